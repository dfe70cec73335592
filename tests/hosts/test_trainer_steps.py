"""The real Trainer: packed training is unpacked training, step by step."""

import pickle

import pytest
import torch
from tiny_models import tiny_model
from trainer_runs import (
    MAX_LENGTH,
    Leaky,
    documents,
    excess,
    packs,
    quiet,
    train,
    unpacked,
    weights,
)

from hf_neat_packing import DataCollatorForNeatPacking, PackingCallback, pack_dataset
from hf_neat_packing.errors import ContractError

STEPS = 10


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


def against_unpacked(folder, model, collator, **options):
    """Losses, counts, and how far the weights are, each beside the unpacked run's."""
    items = tuple(sorted(options.items()))
    truth = unpacked(folder, torch.float64, items)
    reference = unpacked(folder, torch.float32, items)
    watch, counts = train(model, packs(), collator, folder, **options)
    return watch, counts, reference, truth, excess(model, reference[0], truth[0], STEPS)


def alike(losses, reference, truth):
    """Whether logged losses are as near to the true ones as those of the unpacked run, in all steps."""
    ours, theirs, true = (torch.tensor(values).double() for values in (losses, reference, truth))
    # They are logged as float32, whatever the model is.
    rounding = STEPS * torch.finfo(torch.float32).eps * true.norm()
    return bool((ours - true).norm() <= 2 * (theirs - true).norm() + rounding)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("key", ["neat_varlen", "sdpa", "eager"])
def test_c24_ten_steps_packed_are_ten_steps_unpacked(folder, key, accumulation):
    model = tiny_model("llama", key)
    watch, counts, reference, truth, far = against_unpacked(
        folder, model, DataCollatorForNeatPacking(model), gradient_accumulation_steps=accumulation
    )
    assert counts == reference[2], "the loss is averaged over the same number of targets"
    assert len(counts) == len(reference[2]) > STEPS * (accumulation - 1)
    for ours, theirs, true in zip(watch.losses, reference[1].losses, truth[1].losses, strict=True):
        # A loss is logged as float32, whatever the model is.
        assert (
            abs(ours - true) <= 2 * abs(theirs - true) + 8 * torch.finfo(torch.float32).eps * true
        )
    assert far <= 1


def test_the_comparison_fails_for_packs_without_boundaries(folder):
    model = tiny_model("llama", "sdpa")
    watch, counts, reference, truth, far = against_unpacked(folder, model, Leaky(model))
    assert counts == reference[2], "the count alone shows nothing"
    assert far > 100
    assert not alike(watch.losses, reference[1].losses, truth[1].losses)


def test_bf16_autocast_is_as_near_to_the_truth_as_unpacked_autocast(folder):
    truth = unpacked(folder, torch.float64)
    options = {"bf16": True}
    reference = unpacked(folder, torch.float32, tuple(options.items()))
    model = tiny_model("llama")
    _, counts = train(model, packs(), DataCollatorForNeatPacking(model), folder, **options)
    assert counts == reference[2]
    assert excess(model, reference[0], truth[0], STEPS) <= 1
    exact = unpacked(folder, torch.float32)
    assert (weights(model) - weights(exact[0])).norm() > 0, "autocast did change something"
    leaky = tiny_model("llama", "sdpa")
    train(leaky, packs(), Leaky(leaky), folder, **options)
    assert excess(leaky, reference[0], truth[0], STEPS) > 1


def test_label_smoothing_sees_the_same_targets(folder):
    model = tiny_model("llama")
    _, _, reference, truth, far = against_unpacked(
        folder, model, DataCollatorForNeatPacking(model), label_smoothing_factor=0.2
    )
    assert far <= 1
    plain = unpacked(folder, torch.float64)
    assert excess(plain[0], reference[0], truth[0], STEPS) > 100, "smoothing changes the training"


def test_workers_get_a_collator_without_the_model_and_give_the_same_batches(folder):
    collator = DataCollatorForNeatPacking(tiny_model("llama"))
    assert len(pickle.dumps(collator)) < 20_000
    results = []
    for workers in (0, 2):
        model = tiny_model("llama")
        watch, _ = train(
            model, packs(), DataCollatorForNeatPacking(model), folder, dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
        )  # fmt: skip
        results.append((watch.losses, weights(model)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert len(packs()) < 2 * STEPS, "ten steps of two packs are more than one epoch"


def test_a_written_set_trains_like_the_view(folder):
    results = []
    for data in (packs(), pack_dataset(documents(), max_length=MAX_LENGTH, materialize=True)):
        model = tiny_model("llama")
        results.append(train(model, data, DataCollatorForNeatPacking(model), folder)[0].losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_samplers_that_count_documents_for_tokens_are_refused(folder, strategy):
    model = tiny_model("llama")
    with pytest.raises(ContractError) as error:
        train(
            model, packs(), DataCollatorForNeatPacking(model), folder, callbacks=[PackingCallback()],
            train_sampling_strategy=strategy,
        )  # fmt: skip
    for words in (strategy, "number of its documents", 'train_sampling_strategy="random"'):
        assert words in str(error.value)


def test_what_cuts_flat_rows_is_refused_and_rows_of_packs_pass(folder):
    model = tiny_model("llama")
    collator = DataCollatorForNeatPacking(model)
    split = {"accelerator_config": {"split_batches": True}}
    with pytest.raises(ContractError, match="split_batches"):
        train(model, packs(), collator, folder, callbacks=[PackingCallback()], **split)
    masked = tiny_model("llama", "sdpa")
    rows = DataCollatorForNeatPacking(masked, rows="packs")
    proven = PackingCallback()
    watch, _ = train(masked, packs(), rows, folder, callbacks=[proven], max_steps=1, **split)
    assert len(watch.losses) == 1
    assert proven.proof is not None


def test_what_cuts_rows_is_refused_where_a_key_has_an_entry_for_each_document(folder):
    data = documents().map(lambda row, index: {"document_weight": float(index)}, with_indices=True)
    view = pack_dataset(data, max_length=MAX_LENGTH)
    masked = tiny_model("llama", "sdpa")
    collator = DataCollatorForNeatPacking(masked, rows="packs")
    split = {"accelerator_config": {"split_batches": True}, "remove_unused_columns": False}
    with pytest.raises(ContractError, match=r"document_weight.*each document"):
        train(masked, view, collator, folder, callbacks=[PackingCallback()], **split)
