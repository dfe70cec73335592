"""Exactness of `neat_varlen` on whole models, each check beside a control that must fail."""

import pytest
import torch
from exactness import gradient_leaks, leaking_documents, packed_inputs, parity_excess
from tiny_models import CONFIGS, ENCODERS, random_ids, tiny_model

LENGTHS = [7, 1, 12, 5, 1, 9]
ALL = sorted(CONFIGS)


def one_long_document(name, lengths=LENGTHS):
    """The control: the same row with no boundaries at all."""
    return {"position_ids": torch.arange(sum(lengths))[None]}


@pytest.mark.parametrize("name", ALL)
def test_changing_one_document_leaves_the_others_bit_identical(name):
    model, ids = tiny_model(name), random_ids(LENGTHS)
    inputs = packed_inputs(LENGTHS)
    assert leaking_documents(lambda x: model(x, **inputs).logits, ids, LENGTHS) == []
    control = one_long_document(name)
    assert leaking_documents(lambda x: model(x, **control).logits, ids, LENGTHS) != []


@pytest.mark.parametrize("name", ALL)
def test_no_gradient_reaches_another_document(name):
    model, ids = tiny_model(name), random_ids(LENGTHS)
    assert gradient_leaks(model, packed_inputs(LENGTHS), ids, LENGTHS) == []
    assert gradient_leaks(model, one_long_document(name), ids, LENGTHS) != []


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("name", ALL)
def test_logits_and_every_gradient_equal_the_documents_alone(name, tail):
    """The documents run alone under `eager`, code that shares nothing with ours."""
    packed, alone = tiny_model(name), tiny_model(name, "eager")
    ids, inputs = random_ids(LENGTHS), packed_inputs(LENGTHS, tail=tail)
    assert parity_excess(packed, alone, ids, LENGTHS, inputs) <= 1
    if not tail:
        control = one_long_document(name)
        assert parity_excess(packed, alone, ids, LENGTHS, control) > 100


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "bert"])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [33], [16, 16], [2, 1, 30, 1]])
def test_odd_rows_are_exact(name, lengths):
    packed, alone = tiny_model(name), tiny_model(name, "eager")
    assert parity_excess(packed, alone, random_ids(lengths), lengths, packed_inputs(lengths)) <= 1


@pytest.mark.parametrize("name", [name for name in ALL if name not in ENCODERS])
def test_an_open_cache_changes_nothing(name):
    """A plain loop leaves `use_cache` at True, which switches transformers' own detection off."""
    model, ids, inputs = tiny_model(name), random_ids(LENGTHS), packed_inputs(LENGTHS)
    with torch.no_grad():
        assert torch.equal(
            model(ids, **inputs, use_cache=True).logits,
            model(ids, **inputs, use_cache=False).logits,
        )


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("cache", [True, False])
def test_c01_restarting_positions_alone_never_give_a_plain_causal_result(mask, cache):
    lengths = [3, 4, 5]
    model, ids = tiny_model("llama"), random_ids(lengths)
    inputs = {"position_ids": packed_inputs(lengths)["position_ids"], "use_cache": cache}
    if mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    assert leaking_documents(lambda x: model(x, **inputs).logits, ids, lengths) == []
    assert gradient_leaks(model, inputs, ids, lengths) == []


def test_c01_control_sdpa_leaks_beside_an_all_ones_mask():
    lengths = [3, 4, 5]
    model, ids = tiny_model("llama", "sdpa"), random_ids(lengths)
    positions = packed_inputs(lengths)["position_ids"]
    inputs = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
    assert leaking_documents(lambda x: model(x, **inputs).logits, ids, lengths) != []


@pytest.mark.parametrize("name", ALL)
def test_a_document_map_alone_is_enough(name):
    model, ids, inputs = tiny_model(name), random_ids(LENGTHS), packed_inputs(LENGTHS)
    ids_of = torch.repeat_interleave(torch.arange(1, 7), torch.tensor(LENGTHS))[None]
    with torch.no_grad():
        by_map = model(ids, position_ids=inputs["position_ids"], _packed_seq_ids=ids_of).logits
        assert torch.equal(by_map, model(ids, **inputs).logits)


def test_two_rows_of_a_batch_are_exact():
    model = tiny_model("gemma3")
    rows = [[4, 8], [5, 1, 6]]
    ids = torch.cat([random_ids(row, seed) for seed, row in enumerate(rows)])
    offsets = torch.tensor([0, 4, 12, 17, 18, 24], dtype=torch.int32)
    positions = torch.tensor([[p for n in row for p in range(n)] for row in rows])
    inputs = {
        "position_ids": positions, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
        "max_length_q": 8, "max_length_k": 8,
    }  # fmt: skip
    with torch.no_grad():
        together = model(ids, **inputs).logits
        for index, row in enumerate(rows):
            apart = model(ids[index : index + 1], **packed_inputs(row)).logits
            assert torch.equal(together[index : index + 1], apart)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_c45_windows_stay_inside_documents(name):
    lengths = [6, 7]
    packed, alone = tiny_model(name), tiny_model(name, "eager")
    assert parity_excess(packed, alone, random_ids(lengths), lengths, packed_inputs(lengths)) <= 1


def test_c47_the_gradient_of_the_sinks_is_the_sum_over_documents():
    lengths = [4, 5]
    packed, alone = tiny_model("gpt_oss"), tiny_model("gpt_oss", "eager")
    names = [name for name, _ in packed.named_parameters()]
    assert any("sinks" in name for name in names)
    assert parity_excess(packed, alone, random_ids(lengths), lengths, packed_inputs(lengths)) <= 1
    packed.zero_grad()
    packed(random_ids(lengths), **packed_inputs(lengths)).logits.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for n, p in packed.named_parameters() if "sinks" in n)


def test_c50_soft_capping_bites_and_dropout_is_off_in_evaluation_only():
    lengths = [4, 4]
    ids, inputs = random_ids(lengths), packed_inputs(lengths)
    capped = tiny_model("gemma2")
    with torch.no_grad():
        with_cap = capped(ids, **inputs).logits
        for layer in capped.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert not torch.allclose(with_cap, capped(ids, **inputs).logits)
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        assert torch.equal(model(ids, **inputs).logits, model(ids, **inputs).logits)
        model.train()
        torch.manual_seed(0)
        first = model(ids, **inputs).logits
        assert not torch.equal(first, model(ids, **inputs).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_c56_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model, ids, inputs = tiny_model("gemma3"), random_ids(LENGTHS), packed_inputs(LENGTHS)
    model.train()
    losses = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        loss = model(ids, **inputs, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, recomputed in zip(*losses, strict=True):
        assert torch.equal(plain, recomputed)


def test_c33_a_padded_tail_makes_no_nan_in_bfloat16_training():
    lengths, tail = [5, 6], 5
    model = tiny_model("llama", dtype=torch.bfloat16).train()
    ids = torch.nn.functional.pad(random_ids(lengths), (0, tail))
    labels = torch.nn.functional.pad(random_ids(lengths), (0, tail), value=-100)
    loss = model(ids, **packed_inputs(lengths, tail=tail), labels=labels).loss
    loss.backward()
    assert loss > 0
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())
