"""Losses and gradients through the hooks: checkpointed, unpacked, and never with hooks gone."""

import pytest
import torch
from isolation.mixing_models import documents, values

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.hooks.entry import ModelEntry
from hf_neat_packing.isolation import isolate

LENGTHS = [4, 5, 1, 8]


def gradients(model):
    found = {
        name: parameter.grad.double().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def alone(model, docs):
    """The mean loss over all labels of the documents, one by one, and its gradients."""
    count = sum(len(ids) - 1 for ids in docs)
    total = 0.0
    for ids in docs:
        if len(ids) == 1:
            continue
        loss = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        part = loss * (len(ids) - 1) / count
        part.backward()
        total += float(part.detach())
    return total, gradients(model)


def packed(model, docs):
    batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


def distance(one, other):
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float(value.square().sum()) for value in one.values())) ** 0.5


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_5_text", "rwkv"])
def test_loss_and_gradients_are_those_of_the_documents_alone(model_type):
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    docs = documents(LENGTHS)
    loss, expected = alone(model, docs)
    with isolate(model):
        ours, got = packed(model, docs)
    assert ours == pytest.approx(loss, rel=1e-5)
    assert distance(expected, got) < 1e-4


@pytest.mark.parametrize("model_type", ["bart", "xlnet", "prophetnet", "xlm", "minimax_m3_vl_text"])
def test_gradients_of_models_with_losses_of_their_own_are_those_of_the_documents_alone(model_type):
    docs = documents(LENGTHS)
    weights = torch.randn(sum(LENGTHS), 1, generator=torch.Generator().manual_seed(1))
    truth = tiny_model(model_type)
    for ids, part in zip(docs, weights.split(LENGTHS), strict=True):
        (values(truth(input_ids=ids[None], use_cache=False))[0] * part).sum().backward()
    expected = gradients(truth)
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    with isolate(model):
        batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
        batch.pop("labels", None)
        (values(model(**batch))[0] * weights).sum().backward()
    assert distance(expected, gradients(model)) < 1e-4


@pytest.mark.parametrize("unpack", ["plain", "masked", "each"])
def test_the_loss_of_an_unpacked_row_is_that_of_its_documents(unpack):
    model = tiny_model("llama", attn_implementation="sdpa")
    docs = documents(LENGTHS)
    loss, expected = alone(model, docs)
    entry = ModelEntry(model)
    entry.unpack = unpack
    entry.attach()
    ours, got = packed(model, docs)
    entry.remove()
    assert ours == pytest.approx(loss, rel=1e-5)
    assert distance(expected, got) < 1e-4


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "rwkv"])
def test_c56_recomputed_activations_know_their_documents(model_type, use_reentrant):
    model = tiny_model(model_type, attn_implementation="neat_varlen").train()
    docs = documents(LENGTHS)
    loss, expected = alone(model, docs)
    with isolate(model):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        first, got = packed(model, docs)
        # Two forwards in flight, and a third of other documents between them and their backwards.
        batches = [
            DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in part])
            for part in (docs, documents([3, 9, 2], seed=4))
        ]
        losses = [model(**batch).loss for batch in batches]
        losses[0].backward()
        late = gradients(model)
    assert first == pytest.approx(loss, rel=1e-5)
    assert distance(expected, got) < 1e-4
    assert distance(expected, late) < 1e-4


def test_checkpoint_functions_are_put_back():
    model = tiny_model("mamba2", attn_implementation="neat_varlen").train()
    model.gradient_checkpointing_enable()
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    with isolate(model):
        packed(model, documents(LENGTHS))
    after = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert all(one is two for one, two in zip(functions, after, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_hooks_removed_before_the_backward_are_told_and_not_missed(use_reentrant):
    model = tiny_model("mamba2", attn_implementation="neat_varlen").train()
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    docs = documents(LENGTHS)
    with isolate(model):
        batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
        loss = model(**batch).loss
    with pytest.raises(UnsupportedModelError, match="removed"):
        loss.backward()


def test_a_checkpoint_of_ones_own_that_loses_the_boundaries_raises():
    model = tiny_model("mamba2", attn_implementation="neat_varlen").train()
    docs = documents(LENGTHS)
    with isolate(model):
        batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
        block = model.backbone.layers[0]
        original = block.forward
        block.forward = lambda *args, **kwargs: (
            torch.utils.checkpoint.checkpoint(original, *args, use_reentrant=True, **kwargs)
            if not kwargs
            else torch.utils.checkpoint.checkpoint(
                lambda hidden: original(hidden, **kwargs), *args, use_reentrant=True
            )
        )
        try:
            loss = model(**batch).loss
            with pytest.raises(UnsupportedModelError, match="outside of a forward"):
                loss.backward()
        finally:
            del block.forward
