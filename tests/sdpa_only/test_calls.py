"""What is confined, what is passed through, what is refused: no call is hijacked, none slips by."""

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from sdpa_toys import MAPS, Attention, Decoder, alone, make_batch
from torch import nn

from hf_neat_packing.attention.kernels import VarlenCall, reference
from hf_neat_packing.contract import varlen_kwargs_from_document_map
from hf_neat_packing.errors import (
    BoundaryError,
    ContractError,
    MissingDependencyError,
    UnsupportedAttentionError,
    UnsupportedModelError,
)
from hf_neat_packing.hooks.sdpa import (
    attach_cp1_packed_varlen_hooks,
    configure_cp_varlen,
    cp1_packed_varlen_backend,
    detach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
    pack_sdpa_only_model,
    transformer_engine,
)

CLOSE = 1e-12


class Calls(nn.Module):
    """Runs one function inside a module called `self_attn`, over `[B, H, S, D]` queries."""

    class Inside(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, *tensors):
            return self.function(*tensors)

    def __init__(self, function):
        super().__init__()
        self.self_attn = Calls.Inside(function)

    def forward(self, *tensors):
        return self.self_attn(*tensors)


def heads(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(function, *tensors, document_map=((1, 1, 2, 2),), **options):
    model = Calls(function)
    with pack_sdpa_only_model(model, **options):
        return model(*tensors, _packed_seq_ids=torch.tensor(document_map))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TestRefusedAndPassed:
    def test_a_call_of_another_shape_raises_instead_of_running_plain(self):
        q = heads(1, 2, 4, 8)
        for other in (heads(1, 2, 5, 8), heads(2, 2, 4, 8)):
            with pytest.raises(UnsupportedAttentionError, match=r"packed rows have shape \[1, 4\]"):
                run(causal, other, other, other)
        with pytest.raises(UnsupportedAttentionError, match="packed rows have shape"):
            run(causal, q[0], q[0], q[0])

    def test_cross_attention_and_a_filled_cache_are_refused(self):
        q, longer = heads(1, 2, 4, 8), heads(1, 2, 6, 8)
        with pytest.raises(UnsupportedAttentionError, match="cross-attention, a cache"):
            run(F.scaled_dot_product_attention, q, longer, longer)

    def test_a_call_that_looks_both_ways_is_refused_unless_the_model_is_bidirectional(self):
        q = heads(1, 2, 4, 8)
        with pytest.raises(UnsupportedAttentionError, match="bidirectional=True"):
            run(F.scaled_dot_product_attention, q, q, q)
        out = run(F.scaled_dot_product_attention, q, q, q, bidirectional=True)
        for start in (0, 2):
            piece = q[:, :, start : start + 2]
            expected = F.scaled_dot_product_attention(piece, piece, piece)
            assert torch.allclose(out[:, :, start : start + 2], expected, atol=CLOSE)

    def test_another_tower_of_the_model_is_left_alone(self):
        class Multimodal(nn.Module):
            def __init__(self):
                super().__init__()
                self.vision, self.text = Calls(F.scaled_dot_product_attention), Calls(causal)

            def forward(self, image, tokens):
                return self.vision(image, image, image), self.text(tokens, tokens, tokens)

        model, image, tokens = Multimodal(), heads(1, 2, 4, 8), heads(1, 2, 4, 8, seed=1)
        ids = torch.tensor([[1, 1, 2, 2]])
        with pack_sdpa_only_model(model, modules=["text.self_attn"]):
            seen, text = model(image, tokens, _packed_seq_ids=ids)
        assert torch.equal(seen, F.scaled_dot_product_attention(image, image, image))
        assert not torch.allclose(text, causal(tokens, tokens, tokens))
        with pack_sdpa_only_model(model), pytest.raises(UnsupportedAttentionError, match="vision"):
            model(image, tokens, _packed_seq_ids=ids)

    def test_attention_outside_of_the_hooked_modules_is_refused(self):
        class TwoNames(nn.Module):
            def __init__(self):
                super().__init__()
                self.self_attn, self.mixer = Calls.Inside(causal), Calls.Inside(causal)

            def forward(self, q):
                return self.mixer(q, q, self.self_attn(q, q, q))

        model, q, ids = TwoNames(), heads(1, 2, 4, 8), torch.tensor([[1, 1, 2, 2]])
        with (
            pack_sdpa_only_model(model),
            pytest.raises(UnsupportedModelError, match="carries no hook"),
        ):
            model(q, _packed_seq_ids=ids)
        with pack_sdpa_only_model(model, modules=["self_attn", "mixer"]):
            first = model(q, _packed_seq_ids=ids)[:, :, 2:]
        piece = q[:, :, 2:]
        assert torch.allclose(first, causal(piece, piece, causal(piece, piece, piece)), atol=CLOSE)

    @pytest.mark.parametrize("spelling", ["eager"])
    def test_attention_that_bypasses_sdpa_is_an_error_not_a_leak(self, spelling):
        model = Decoder(spelling=spelling)
        batch, _ = make_batch(MAPS["full"])
        with (
            pack_sdpa_only_model(model),
            pytest.raises(UnsupportedModelError, match="without one call"),
        ):
            model(**batch)

    def test_a_replaced_sdpa_is_not_overwritten_and_its_result_is_not_taken(self, monkeypatch):
        seen = []
        stock = F.scaled_dot_product_attention

        def wrapper(*args, **kwargs):
            seen.append(1)
            return stock(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
        model = Decoder()
        batch, upstream = make_batch(MAPS["full"])
        expected, _ = alone(model, batch, upstream)
        seen.clear()
        with pack_sdpa_only_model(model):
            logits = model(**batch)
            assert F.scaled_dot_product_attention is wrapper
        assert F.scaled_dot_product_attention is wrapper
        assert len(seen) == 2
        assert float((logits - expected).detach().abs().max()) < CLOSE
        # One that computes by itself never reaches torch's function.
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **kwargs: q)
        with (
            pack_sdpa_only_model(model),
            pytest.raises(UnsupportedModelError, match="without one call"),
        ):
            model(**batch)

    def test_a_fused_kernel_called_by_its_own_name_is_refused(self):
        def fused(q, k, v):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, is_causal=True
            )[0]

        q = heads(1, 2, 4, 8)
        with pytest.raises(
            UnsupportedAttentionError, match="_scaled_dot_product_flash_attention_for_cpu"
        ):
            run(fused, q, q, q)

    def test_heads_that_do_not_match_need_enable_gqa_as_in_torch(self):
        q, k = heads(1, 4, 4, 8), heads(1, 2, 4, 8)
        with pytest.raises(UnsupportedAttentionError, match="enable_gqa"):
            run(causal, q, k, k)
        one = heads(1, 1, 4, 8)
        out = run(causal, q, one, one)
        assert torch.allclose(
            out[:, :, :2], causal(q[:, :, :2], one[:, :, :2], one[:, :, :2]), atol=CLOSE
        )

    def test_after_an_error_nothing_is_left_in_force(self):
        model = Decoder()
        batch, _ = make_batch(MAPS["full"])
        expected = model(batch["input_ids"], batch["position_ids"])

        def boom(*_):
            raise RuntimeError("boom")

        broken = model.layers[1].self_attn.o.register_forward_hook(boom)
        with pack_sdpa_only_model(model):
            with pytest.raises(RuntimeError, match="boom"):
                model(**batch)
            broken.remove()
            assert torch.equal(model(batch["input_ids"], batch["position_ids"]), expected)
            with pytest.raises(ContractError):
                model(input_ids=batch["input_ids"], _packed_seq_ids=batch["_packed_seq_ids"])
            assert torch.equal(model(batch["input_ids"], batch["position_ids"]), expected)


class TestAttach:
    def test_attaching_twice_adds_no_hooks_and_the_last_handle_takes_them_off(self):
        model = Decoder()
        first = attach_cp1_packed_varlen_hooks(model)
        count = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
        second = attach_cp1_packed_varlen_hooks(model)
        assert count == sum(
            len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()
        )
        assert first.hooked == second.hooked == ("layers.0.self_attn", "layers.1.self_attn")
        first.remove()
        first.remove()
        assert len(model._forward_pre_hooks) == 1
        second.remove()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert model.__dict__.keys() == Decoder().__dict__.keys()

    def test_detach_takes_everything_off(self):
        model = Decoder()
        attach_cp1_packed_varlen_hooks(model)
        attach_cp1_packed_varlen_hooks(model)
        detach_cp1_packed_varlen_hooks(model)
        detach_cp1_packed_varlen_hooks(model)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_other_hooks_on_the_same_model_are_refused(self):
        model = Decoder()
        with (
            attach_cp1_packed_varlen_hooks(model),
            pytest.raises(ContractError, match="already carries"),
        ):
            pack_sdpa_only_model(model)

    def test_a_model_without_attention_says_what_was_looked_for(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential())
        model.add_module("mixer", Calls.Inside(causal))
        with pytest.raises(UnsupportedModelError, match=r"self_attn.*MultiheadAttention.*mixer"):
            pack_sdpa_only_model(model)
        with pytest.raises(UnsupportedModelError, match=r"\['blocks.0.attn'\]"):
            pack_sdpa_only_model(model, modules=["blocks.0.attn"])
        with pytest.raises(UnsupportedModelError, match="Linear"):
            pack_sdpa_only_model(model, modules=[nn.Linear(2, 2)])
        pack_sdpa_only_model(model, modules=[model.mixer]).remove()

    def test_a_layer_that_checkpoints_its_own_forward_cannot_be_the_attention(self):
        model = Decoder()
        model.layers[0].gradient_checkpointing = False
        with pytest.raises(UnsupportedModelError, match="checkpoints its own forward"):
            pack_sdpa_only_model(model, modules=["layers.0"])

    def test_wrappers_are_looked_through(self):
        class Wrapper(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def forward(self, *args, **kwargs):
                return self.module(*args, **kwargs)

        model = Decoder()
        batch, upstream = make_batch(MAPS["full"])
        expected, _ = alone(model, batch, upstream)
        with pack_sdpa_only_model(Wrapper(model)) as handle:
            assert handle.module is model
            assert float((Wrapper(model)(**batch) - expected).detach().abs().max()) < CLOSE

    def test_a_deep_copy_is_packed_by_itself(self):
        model = Decoder()
        batch, upstream = make_batch(MAPS["full"])
        expected, _ = alone(model, batch, upstream)
        with pack_sdpa_only_model(model):
            twin = copy.deepcopy(model)
        with torch.no_grad():
            assert float((twin(**batch) - expected).abs().max()) < CLOSE
        detach_cp1_packed_varlen_hooks(twin)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in twin.modules())


class TestBatch:
    def test_keys_that_the_forward_does_not_take_are_taken_away_and_the_batch_is_not_changed(self):
        model = Decoder()
        batch, upstream = make_batch(MAPS["full"])
        expected, _ = alone(model, batch, upstream)
        batch |= varlen_kwargs_from_document_map(batch["_packed_seq_ids"])
        batch |= {
            "seq_idx": batch["_packed_seq_ids"].int(),
            "packed_token_indices": batch["_packed_seq_ids"],
        }
        batch |= {"cu_seqlens": torch.zeros(2, 3), "max_seqlen": 3}
        names = set(batch)
        with pack_sdpa_only_model(model):
            assert float((model(**batch) - expected).detach().abs().max()) < CLOSE
        assert set(batch) == names

    def test_sources_that_disagree_are_refused(self):
        model = Decoder()
        batch, _ = make_batch(MAPS["full"])
        stale = varlen_kwargs_from_document_map(torch.tensor(MAPS["one"] * 2))
        with pack_sdpa_only_model(model):
            with pytest.raises(BoundaryError, match="disagree"):
                model(**batch, **stale)
            with pytest.raises(ContractError, match="half there"):
                model(**{**batch, "cu_seq_lens_q": stale["cu_seq_lens_q"]})
            with pytest.raises(BoundaryError, match="numbers them differently"):
                model(**batch, attention_mask=batch["_packed_seq_ids"].flip(1))

    def test_positions_must_come_where_the_model_takes_them_and_only_there(self):
        class Rotary(nn.Module):
            def __init__(self):
                super().__init__()
                self.self_attn = Attention(16)

            def forward(self, hidden_states):
                return self.self_attn(hidden_states, torch.arange(hidden_states.shape[1])[None])

        batch, _ = make_batch(MAPS["full"])
        with (
            pack_sdpa_only_model(Decoder()) as handle,
            pytest.raises(ContractError, match="takes `position_ids`"),
        ):
            handle.module(input_ids=batch["input_ids"], _packed_seq_ids=batch["_packed_seq_ids"])
        model = Rotary().double()
        hidden = heads(2, 8, 16)
        with pack_sdpa_only_model(model):
            with pytest.raises(ContractError, match="relative"):
                model(
                    hidden,
                    position_ids=batch["position_ids"],
                    _packed_seq_ids=batch["_packed_seq_ids"],
                )
            packed = model(hidden, _packed_seq_ids=batch["_packed_seq_ids"])
        for row in range(2):
            for number in (1, 2, 3):
                where = batch["_packed_seq_ids"][row] == number
                expected = model(hidden[row, where][None])[0]
                assert torch.allclose(packed[row, where], expected, atol=CLOSE)

    def test_an_invalid_map_is_refused(self):
        q = heads(1, 2, 4, 8)
        with pytest.raises(BoundaryError, match="comes back"):
            run(causal, q, q, q, document_map=((1, 2, 1, 2),))


class TestBackends:
    @pytest.fixture(autouse=True)
    def _restored(self):
        yield
        configure_cp_varlen()

    def test_nothing_is_configured_until_it_is(self):
        assert cp1_packed_varlen_backend() is None
        configure_cp_varlen(attn_backend="Torch-SDPA")
        assert cp1_packed_varlen_backend() == "sdpa"
        configure_cp_varlen(attn_backend="auto")
        assert cp1_packed_varlen_backend() is None

    @pytest.mark.parametrize("name", ["bogus", "sdpa2", "flash_attention_9"])
    def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(self, name):
        for call in (
            lambda: configure_cp_varlen(attn_backend=name),
            lambda: enable_cp1_packed_varlen(torch.tensor([1, 1]), name),
            lambda: pack_sdpa_only_model(Decoder(), backend=name),
        ):
            with pytest.raises(ContractError, match=f"{name}.*auto, flash, te, torch_varlen, sdpa"):
                call()

    @pytest.mark.parametrize("name", ["te", "transformer_engine"])
    def test_an_unavailable_backend_is_an_error_by_name(self, name):
        with pytest.raises(
            MissingDependencyError, match="'te' needs the package transformer_engine"
        ):
            configure_cp_varlen(attn_backend=name)

    def test_a_backend_asked_for_by_name_is_never_replaced(self):
        q = heads(1, 2, 4, 8)
        with pytest.raises(UnsupportedAttentionError, match=r"'torch_varlen'.*needs CUDA"):
            run(causal, q, q, q, backend="torch_varlen")

    def test_the_backend_of_a_forward_rides_with_it(self):
        model = Decoder(recompute="reentrant")
        batch, upstream = make_batch(MAPS["full"])
        with attach_cp1_packed_varlen_hooks(model):
            configure_cp_varlen(attn_backend="sdpa")
            enable_cp1_packed_varlen(batch["_packed_seq_ids"], None)
            output = model(batch["input_ids"], batch["position_ids"])
            disable_cp1_packed_varlen()
            configure_cp_varlen(
                attn_backend="torch_varlen"
            )  # would refuse CPU tensors in the recompute
            output.backward(upstream)

    @pytest.mark.parametrize("right", [0, None])
    def test_transformer_engine_is_given_documents_in_its_own_words(self, monkeypatch, right):
        """A stand-in with the documented signature; the real package needs CUDA."""

        class DotProductAttention(nn.Module):
            def __init__(self, num_attention_heads, kv_channels, **options):
                super().__init__()
                assert (num_attention_heads, kv_channels) == (4, 8)
                mask_type, self.scale = options.pop("attn_mask_type"), options.pop("softmax_scale")
                assert options == {
                    "num_gqa_groups": 2,
                    "attention_dropout": 0.0,
                    "qkv_format": "thd",
                }
                self.right = {"padding_causal": 0, "padding": None}[mask_type]

            def forward(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
                call = VarlenCall(
                    q, k, v, cu_seqlens_q, max_seqlen_q, None, right=self.right, scale=self.scale
                )
                return reference.attention(call).flatten(1)

        package = types.ModuleType("transformer_engine.pytorch")
        package.DotProductAttention = DotProductAttention
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
        q, k = heads(6, 4, 8), heads(6, 2, 8)
        call = VarlenCall(
            q, k, k, torch.tensor([0, 2, 6], dtype=torch.int32), 4, (2, 4), right=right, scale=0.3
        )
        assert torch.equal(transformer_engine.attention(call), reference.attention(call))
        assert "not installed" in transformer_engine.why_not(call)

    def test_one_dimensional_ids_are_one_row(self):
        model = Decoder()
        batch, upstream = make_batch([[1, 1, 2, 2, 2]])
        expected, _ = alone(model, batch, upstream)
        for ids in (batch["_packed_seq_ids"], batch["_packed_seq_ids"][0]):
            with attach_cp1_packed_varlen_hooks(model):
                enable_cp1_packed_varlen(ids, "sdpa")
                logits = model(batch["input_ids"], batch["position_ids"])
                disable_cp1_packed_varlen()
            assert float((logits - expected).detach().abs().max()) < CLOSE
