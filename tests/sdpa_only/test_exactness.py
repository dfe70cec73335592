"""Packed rows under `pack_sdpa_only_model` give each document what it gives alone."""

import pytest
import torch
from sdpa_toys import MAPS, Decoder, alone, difference, gradients, make_batch

from hf_neat_packing.hooks.sdpa import pack_sdpa_only_model

CLOSE = 1e-12  # float64; documents that mix differ by 1e-2 and more, see the controls


def without_boundaries(batch):
    return {name: value for name, value in batch.items() if name != "_packed_seq_ids"}


@pytest.mark.parametrize("spelling", ["attribute", "imported"])
@pytest.mark.parametrize("name", MAPS)
def test_logits_and_every_gradient_are_those_of_the_documents_alone(name, spelling):
    model = Decoder(spelling=spelling)
    batch, upstream = make_batch(MAPS[name])
    expected, expected_gradients = alone(model, batch, upstream)
    with pack_sdpa_only_model(model):
        logits = model(**batch)
    logits.backward(upstream)
    real = batch["_packed_seq_ids"] != 0
    assert float((logits.detach() - expected)[real].abs().max()) < CLOSE
    assert difference(gradients(model), expected_gradients) < CLOSE
    if name != "one":
        plain = model(**without_boundaries(batch))
        assert float((plain - expected)[real].detach().abs().max()) > 1e-2, "control: documents mix"


def test_no_bit_of_a_document_moves_when_every_token_of_another_changes():
    model = Decoder()
    batch, _ = make_batch(MAPS["tail"])
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    first = batch["_packed_seq_ids"] == 1
    changed["input_ids"][first] = (changed["input_ids"][first] + 7) % 50
    with pack_sdpa_only_model(model), torch.no_grad():
        before, after = model(**batch), model(**changed)
    others = batch["_packed_seq_ids"] > 1
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[first], after[first])
    with torch.no_grad():
        before, after = (model(**without_boundaries(x)) for x in (batch, changed))
    assert not torch.equal(before[others], after[others]), "control: plain attention leaks"


def test_the_gradient_of_a_later_document_towards_an_earlier_one_is_exactly_zero():
    model = Decoder()
    batch, _ = make_batch([[1, 1, 1, 2, 2, 2, 2]])
    embeds = model.embed(batch.pop("input_ids")).detach().requires_grad_()
    with pack_sdpa_only_model(model):
        model(inputs_embeds=embeds, **batch)[:, 3:].sum().backward()
    assert torch.equal(embeds.grad[:, :3], torch.zeros_like(embeds.grad[:, :3]))
    embeds.grad = None
    model(inputs_embeds=embeds, **without_boundaries(batch))[:, 3:].sum().backward()
    assert embeds.grad[:, :3].abs().max() > 1e-4, "control: plain attention has such a gradient"


def test_padding_is_zero_after_attention_and_nothing_is_nan():
    model = Decoder(layers=1)
    seen = []
    hook = model.layers[0].self_attn.o.register_forward_pre_hook(
        lambda m, args: seen.append(args[0])
    )
    batch, upstream = make_batch(MAPS["inside"])
    with pack_sdpa_only_model(model):
        logits = model(**batch)
    logits.backward(upstream)
    hook.remove()
    assert torch.equal(seen[0][batch["_packed_seq_ids"] == 0].count_nonzero(), torch.tensor(0))
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(g).all() for g in gradients(model).values())


def test_a_batch_of_padding_alone_runs_and_keeps_every_parameter_in_the_graph():
    model = Decoder()
    batch, _ = make_batch([[0, 0, 0], [0, 0, 0]])
    with pack_sdpa_only_model(model):
        logits = model(**batch)
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad is not None for p in model.parameters())


def test_a_window_mask_of_the_model_is_honoured_inside_documents():
    model = Decoder()
    batch, _ = make_batch(MAPS["tail"])
    size = batch["input_ids"].shape[1]
    window = torch.ones(size, size, dtype=torch.bool).tril().triu(-1)
    with pack_sdpa_only_model(model), torch.no_grad():
        packed = model(**batch, mask=window)
        additive = model(**batch, mask=torch.zeros(size, size).double().masked_fill(~window, -1e30))
        full = model(**batch)
    document_map = batch["_packed_seq_ids"]
    for row in range(2):
        for number in set(document_map[row].tolist()) - {0}:
            where = document_map[row] == number
            length = int(where.sum())
            with torch.no_grad():
                expected = model(
                    batch["input_ids"][row, where][None],
                    batch["position_ids"][row, where][None],
                    mask=window[:length, :length],
                )[0]
            assert float((packed[row, where] - expected).abs().max()) < CLOSE
            assert float((additive[row, where] - expected).abs().max()) < CLOSE
    assert float((full - packed).abs().max()) > 1e-4, "control: the window matters"


def test_dropout_is_the_callers_and_follows_the_seed():
    model = Decoder(dropout=0.5)
    batch, _ = make_batch(MAPS["full"])
    outputs = []
    with pack_sdpa_only_model(model), torch.no_grad():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outputs.append(model(**batch))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("form", ["map", "varlen", "indexed_mask", "both"])
def test_boundaries_are_read_in_every_form_that_a_batch_has(form):
    from hf_neat_packing.contract import varlen_kwargs_from_document_map

    class WithMask(Decoder):
        def forward(self, input_ids, position_ids, attention_mask=None):
            assert attention_mask is None or set(attention_mask.unique().tolist()) <= {0, 1}
            return super().forward(input_ids, position_ids)

    model = WithMask()
    batch, upstream = make_batch(MAPS["full"])
    expected, _ = alone(model, batch, upstream)
    document_map = batch.pop("_packed_seq_ids")
    if form in ("map", "both"):
        batch["_packed_seq_ids"] = document_map
    if form in ("varlen", "both"):
        batch |= varlen_kwargs_from_document_map(document_map)
    if form == "indexed_mask":
        batch["attention_mask"] = document_map
    with pack_sdpa_only_model(model):
        assert float((model(**batch) - expected).detach().abs().max()) < CLOSE


def test_lower_precision_is_as_far_from_float64_as_the_documents_alone():
    batch, upstream = make_batch(MAPS["tail"])
    exact, _ = alone(Decoder(), batch, upstream)
    for dtype in (torch.float32, torch.bfloat16):
        model = Decoder().to(dtype)
        expected, _ = alone(model, batch, upstream.to(dtype))
        with pack_sdpa_only_model(model), torch.no_grad():
            packed = model(**batch)
        real = batch["_packed_seq_ids"] != 0
        bound = 2 * float((expected.double() - exact)[real].abs().max())
        assert float((packed.double() - exact)[real].abs().max()) < bound
