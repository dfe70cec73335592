"""Real architectures that reach only SDPA: Falcon, and encoders and decoders of torch's own MultiheadAttention."""

import pytest
import torch
from sdpa_toys import MAPS, VOCABULARY, alone, difference, gradients, make_batch
from torch import nn
from transformers import FalconConfig, FalconForCausalLM

from hf_neat_packing.errors import UnsupportedAttentionError
from hf_neat_packing.hooks.sdpa import pack_sdpa_only_model

CLOSE = 1e-12
FAR = 1e-3


def falcon(**options):
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return FalconForCausalLM(config).to(torch.float64).train()


FALCONS = {
    "rotary_multi_query": {"alibi": False, "multi_query": True},
    "rotary_grouped": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
}


def logits_of(output):
    return output.logits


class TestFalcon:
    @pytest.mark.parametrize(
        "checkpointing", [None, True, False], ids=["kept", "reentrant", "non_reentrant"]
    )
    @pytest.mark.parametrize("kind", FALCONS)
    @pytest.mark.parametrize("name", ["full", "tail", "between"])
    def test_packed_rows_are_the_documents_alone(self, kind, name, checkpointing):
        model = falcon(**FALCONS[kind])
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        batch, upstream = make_batch(MAPS[name])
        other, _ = make_batch([[1] * 3 + [2] * 5], seed=4)
        expected, expected_gradients = alone(model, batch, upstream, logits_of)
        with pack_sdpa_only_model(model) as handle:
            assert handle.hooked[0] == "transformer.h.0.self_attention"
            logits = model(**batch).logits
            model(**other)
            logits.backward(upstream)
        real = batch["_packed_seq_ids"] != 0
        assert float((logits.detach() - expected)[real].abs().max()) < CLOSE
        assert difference(gradients(model), expected_gradients) < CLOSE

    def test_control_without_the_hooks_documents_mix(self):
        model = falcon(**FALCONS["rotary_grouped"])
        batch, upstream = make_batch(MAPS["full"])
        expected, _ = alone(model, batch, upstream, logits_of)
        plain = model(**{**batch, "_packed_seq_ids": None}).logits
        assert float((plain - expected).detach().abs().max()) > FAR

    def test_unpacked_batches_and_generation_run_as_before(self):
        model = falcon(**FALCONS["rotary_grouped"]).eval()
        tokens = torch.tensor([[3, 4, 5]])
        expected = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with pack_sdpa_only_model(model):
            assert torch.equal(
                model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0), expected
            )


class Encoder(nn.Module):
    """A text encoder of torch's own layers; it has no positions, so order is all in the mask."""

    def __init__(self, *, causal=False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True, norm_first=causal)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not causal)
        self.head = nn.Linear(16, VOCABULARY)
        self.causal = causal
        self.to(torch.float64)

    def forward(self, input_ids, attention_mask=None):
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(
                input_ids.shape[1], dtype=torch.float64
            )
        padding = None if attention_mask is None else attention_mask == 0
        x = self.encoder(
            self.embed(input_ids), mask=mask, is_causal=self.causal, src_key_padding_mask=padding
        )
        return self.head(x)


def without_positions(document_map):
    batch, upstream = make_batch(document_map)
    del batch["position_ids"]
    return batch, upstream


class TestMultiheadAttention:
    @pytest.mark.parametrize("padding", [False, True], ids=["", "padding_mask"])
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
    @pytest.mark.parametrize("name", MAPS)
    def test_documents_are_block_diagonal(self, name, causal, training, padding):
        model = Encoder(causal=causal).train(training)
        batch, upstream = without_positions(MAPS[name])
        real = batch["_packed_seq_ids"] != 0
        expected, expected_gradients = alone(model, batch, upstream)
        if padding:
            batch["attention_mask"] = real.long()
        with pack_sdpa_only_model(model, bidirectional=not causal):
            logits = model(**batch)
        logits.backward(upstream)
        assert torch.isfinite(logits).all()
        assert float((logits.detach() - expected)[real].abs().max()) < CLOSE
        assert difference(gradients(model), expected_gradients) < CLOSE

    @pytest.mark.parametrize("padding", [False, True])
    def test_the_fused_paths_of_evaluation_without_gradients_do_not_slip_by(self, padding):
        model = Encoder().eval()
        batch, upstream = without_positions(MAPS["tail"])
        real = batch["_packed_seq_ids"] != 0
        expected, _ = alone(model, batch, upstream)
        if padding:
            batch["attention_mask"] = real.long()
        with torch.no_grad(), pack_sdpa_only_model(model, bidirectional=True):
            logits = model(**batch)
        assert float((logits - expected)[real].abs().max()) < CLOSE
        with torch.no_grad():
            plain = model(batch["input_ids"])
        assert float((plain - expected)[real].abs().max()) > FAR, "control: documents mix"

    @pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}], ids=str)
    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_every_form_of_the_module(self, options, need_weights, batch_first):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).double()
        model = nn.Module()
        model.self_attn = attention
        widths = (8, options.get("kdim", 8), options.get("vdim", 8))
        weights = [nn.Linear(8, width, bias=False).double() for width in widths]

        def forward(x):
            tensors = (x, x, x) if not options.get("kdim") else (x, *(w(x) for w in weights[1:]))
            return attention(*tensors, need_weights=need_weights)

        model.forward = forward
        document_map = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3]])
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        with pack_sdpa_only_model(model, bidirectional=True):
            if options.get("kdim"):
                # Keys that are other tensors than the queries cannot be told from cross-attention.
                with pytest.raises(UnsupportedAttentionError, match="cross-attention"):
                    model(x if batch_first else x.transpose(0, 1), _packed_seq_ids=document_map)
                return
            output, attended = model(
                x if batch_first else x.transpose(0, 1), _packed_seq_ids=document_map
            )
        output = output if batch_first else output.transpose(0, 1)
        for row in range(2):
            for number in set(document_map[row].tolist()) - {0}:
                where = document_map[row] == number
                piece = x[row, where]
                expected, expected_weights = attention(
                    piece, piece, piece, need_weights=need_weights
                )
                assert torch.allclose(output[row, where], expected, atol=CLOSE)
                if need_weights:
                    assert torch.allclose(
                        attended[row][where][:, where], expected_weights, atol=CLOSE
                    )
                    assert attended[row][where][:, ~where].abs().max() == 0
        assert (attended is not None) == need_weights
        assert torch.isfinite(output).all()

    def test_a_row_without_a_batch_dimension(self):
        attention = nn.MultiheadAttention(8, 2).double()
        model = nn.Sequential()
        model.add_module("attn", attention)
        model.forward = lambda x: attention(x, x, x, need_weights=False)[0]
        x = torch.randn(5, 8, dtype=torch.float64)
        with pack_sdpa_only_model(model, bidirectional=True):
            output = model(x, _packed_seq_ids=torch.tensor([[1, 1, 2, 2, 2]]))
        for where in (slice(0, 2), slice(2, 5)):
            assert torch.allclose(
                output[where], attention(x[where], x[where], x[where])[0], atol=CLOSE
            )

    def test_cross_attention_and_keys_of_no_document_are_refused(self):
        x, memory = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
        document_map = torch.tensor([[1, 1, 2, 2]])
        for options, tensors, message in (
            ({}, (x, memory, memory), "cross-attention"),
            ({"add_bias_kv": True}, (x, x, x), "bias_k"),
            ({"add_zero_attn": True}, (x, x, x), "add_zero_attn"),
        ):
            attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
            model = nn.Sequential()
            model.add_module("attn", attention)
            model.forward = lambda *inputs, attention=attention: attention(
                *inputs, need_weights=False
            )[0]
            with pack_sdpa_only_model(model, bidirectional=True):
                with pytest.raises(UnsupportedAttentionError, match=message):
                    model(*tensors, _packed_seq_ids=document_map)
                model(*tensors)  # without boundaries it is nobody's business
