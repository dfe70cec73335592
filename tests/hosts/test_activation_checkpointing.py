"""Recomputed and offloaded activations: gradients of packs are those of documents alone, hooks and all."""

import contextlib
import itertools

import pytest
from distributed_reference import BOUNDARIES, OneProcess, optimizer_of, weights_of
from tiny_models import random_ids, tiny_model
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    configure_packing_for_models,
    isolate,
    pack_sdpa_only_model,
)
from hf_neat_packing.audit import zoo
from hf_neat_packing.contract import VARLEN_KEYS

BATCHES = [[4, 5, 1, 8], [3, 9, 2, 6]]
TARGETS = sum(length - 1 for lengths in BATCHES for length in lengths)


def documents():
    numbers = itertools.count()
    return [[random_ids([n], seed=next(numbers))[0] for n in lengths] for lengths in BATCHES]


def llama():
    return tiny_model("llama").train()


def recurrent():
    return zoo.tiny_model("qwen3_5_text", attn_implementation="neat_varlen").train()


def sdpa_only():
    return tiny_model("llama", "sdpa").train()


@contextlib.contextmanager
def entry_hook(model):
    """Offsets are made at model entry out of the document map, as behind a pipeline split."""
    configure_packing_for_models([model])
    yield


@contextlib.contextmanager
def nothing(model):
    yield


# What builds the model, what is put on it, and the keys that the batch must do without.
HOSTS = {
    "neat_varlen": (llama, nothing, ()),
    "offsets made at entry": (llama, entry_hook, VARLEN_KEYS),
    "isolate": (recurrent, isolate, ()),
    "pack_sdpa_only_model": (sdpa_only, pack_sdpa_only_model, ("attention_mask",)),
}
_REFERENCES = {}


def one_process(build):
    """The documents alone, without recomputation; once for each model."""
    if build not in _REFERENCES:
        flat = [ids for batch in documents() for ids in batch]
        _REFERENCES[build] = OneProcess(build().eval(), [flat], targets=TARGETS)
    return _REFERENCES[build]


def recompute(model, *, reentrant, offload=False, every=1):
    """Turn checkpointing on; with `offload`, as transformers offloads: around each checkpoint.

    Its own `offload=True` pins memory, which a torch without an accelerator cannot.
    """
    options = {"use_reentrant": reentrant}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=options, every_n_layers=every
    )

    def offloading(function, *args, **kwargs):
        with save_on_cpu():
            return checkpoint(function, *args, **options, **kwargs)

    for module in model.modules():
        if offload and "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = offloading


def step(model, *, without=(), around=contextlib.nullcontext, together=False):
    """One update of two packed batches: both forwards, then the backward of each, or one of both."""
    collator, optimizer = DataCollatorForNeatPacking(model), optimizer_of(model)
    losses = []
    with around():
        for ids in documents():
            batch = collator([{"input_ids": document.tolist()} for document in ids])
            batch = {name: value for name, value in batch.items() if name not in without}
            losses.append(model(**batch, num_items_in_batch=TARGETS, use_cache=False).loss)
    for loss in [sum(losses)] if together else losses:
        loss.backward()
    optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("around", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("host", HOSTS)
def test_c56_two_batches_in_flight_are_exact_recomputed_and_offloaded(host, reentrant, around):
    build, hooks, without = HOSTS[host]
    model = build()
    recompute(model, reentrant=reentrant)
    with hooks(model):
        weights = step(model, without=without, around=around)
    assert one_process(build).excess(weights) <= 1


@pytest.mark.parametrize(("reentrant", "every"), [(True, 1), (False, 1), (False, 2)])
@pytest.mark.parametrize("host", HOSTS)
def test_the_offload_of_transformers_is_exact_also_on_every_second_layer(host, reentrant, every):
    build, hooks, without = HOSTS[host]
    model = build()
    recompute(model, reentrant=reentrant, offload=True, every=every)
    with hooks(model):
        weights = step(model, without=without, together=every == 1)
    assert one_process(build).excess(weights) <= 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_put_on_before_checkpointing_is_turned_on_serve_as_well(reentrant):
    model = recurrent()
    with isolate(model):
        recompute(model, reentrant=reentrant, offload=True)
        weights = step(model)
    assert one_process(recurrent).excess(weights) <= 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("build", [llama, recurrent, sdpa_only])
def test_the_control_without_boundaries_is_far_from_documents_alone(build, reentrant):
    model = build()
    recompute(model, reentrant=reentrant)
    without = {*BOUNDARIES, "attention_mask"}
    assert one_process(build).excess(step(model, without=without, around=save_on_cpu)) > 100
