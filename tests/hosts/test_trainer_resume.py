"""Checkpoint and resume in the middle of an epoch: the same batches and the same weights, bit for bit."""

import hashlib

import pytest
import torch
from tiny_models import tiny_model
from trainer_runs import CountingTrainer, packs, quiet, train, weights

from hf_neat_packing import DataCollatorForNeatPacking, PackingCallback
from hf_neat_packing.dataset.packed_trainer import PackedTrainerMixin

STEPS, SAVED = 6, 3


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


class Watched(DataCollatorForNeatPacking):
    """Notes every batch that it makes."""

    def __call__(self, features, **kwargs):
        batch = super().__call__(features, **kwargs)
        read = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "labels"))
        self.made.append(hashlib.sha256(read).hexdigest())
        return batch


def run(folder, resume=None, steps=STEPS, **options):
    model = tiny_model("llama")
    collator = Watched(model)
    collator.made = []
    watch, _ = train(
        model, packs(), collator, folder, resume=resume,
        callbacks=[PackingCallback(skip_dry_run=type(model).__name__)],  # it would be counted too
        max_steps=steps, lr_scheduler_type="constant", save_strategy="steps", save_steps=SAVED, **options,
    )  # fmt: skip
    return model, collator.made, watch


class Balanced(PackedTrainerMixin, CountingTrainer):
    pass


@pytest.mark.parametrize(
    ("accumulation", "host"), [(1, CountingTrainer), (2, CountingTrainer), (2, Balanced)]
)
def test_resuming_in_an_epoch_gives_bit_identical_batches_and_weights(tmp_path, accumulation, host):
    options = {"gradient_accumulation_steps": accumulation, "host": host}
    whole, made, watch = run(tmp_path / "whole", **options)
    run(tmp_path / "parts", steps=SAVED, **options)
    saved = tmp_path / "parts" / f"checkpoint-{SAVED}"
    resumed, rest, seen = run(tmp_path / "parts", resume=saved, **options)
    done, epoch = SAVED * accumulation, -(-len(packs()) // 2)
    assert done % epoch, "the checkpoint lies inside an epoch"
    assert rest == made[done:]
    assert torch.equal(weights(resumed), weights(whole))
    assert seen.losses == watch.losses[SAVED:]
    assert rest != made[: len(rest)], "other batches would show"


def test_the_comparison_fails_for_another_order(tmp_path):
    options = {"save_strategy": "no", "save_steps": 500}
    runs = [train_only(tmp_path, **options, data_seed=seed) for seed in (None, 11)]
    assert not torch.equal(*runs)


def train_only(folder, **options):
    model = tiny_model("llama")
    train(
        model, packs(), DataCollatorForNeatPacking(model), folder, max_steps=STEPS,
        lr_scheduler_type="constant", **options,
    )  # fmt: skip
    return weights(model)
