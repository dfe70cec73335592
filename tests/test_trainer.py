"""The real Trainer: packed training is unpacked training, step by step."""

import copy
import random

import datasets
import pytest
import torch
from tiny_models import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neat_packing import DataCollatorForNeatPacking, pack_dataset

BIGGEST = 32


def make_documents(count=40):
    rng = random.Random(0)
    lengths = [rng.choice([1, 2, 5, 9, 14, 30]) for _ in range(count)]
    return datasets.Dataset.from_list(
        [{"input_ids": [rng.randrange(3, 97) for _ in range(n)]} for n in lengths]
    )


class Padded:
    """The control: the documents of each pack as rows of their own, padded on the right."""

    def __call__(self, packs):
        documents = [torch.as_tensor(ids) for pack in packs for ids in pack["input_ids"]]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(documents, batch_first=True)
        mask = pad([torch.ones_like(d) for d in documents], batch_first=True)
        return {
            "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100).long()
        }  # fmt: skip


class Watch(TrainerCallback):
    def __init__(self):
        self.losses, self.items = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class CountingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.counts = [*getattr(self, "counts", []), int(num_items_in_batch)]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def train(model, data, collator, tmp_path, **options):
    watch = Watch()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=10, logging_steps=1,
        learning_rate=1e-3, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3,
        **options,
    )  # fmt: skip
    trainer = CountingTrainer(
        model=model, args=arguments, train_dataset=data, data_collator=collator, callbacks=[watch]
    )
    trainer.train()
    return watch.losses, trainer.counts


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("key", ["neat_varlen", "sdpa", "eager"])
def test_ten_steps_packed_are_ten_steps_unpacked(tmp_path, key, accumulation):
    view = pack_dataset(make_documents(), max_length=BIGGEST)
    start = tiny_model("llama", "eager", torch.float64).train()
    options = {"gradient_accumulation_steps": accumulation}
    packed = tiny_model("llama", key, torch.float64).train()
    losses, counts = train(packed, view, DataCollatorForNeatPacking(packed), tmp_path, **options)
    unpacked = copy.deepcopy(start)
    wanted, items = train(unpacked, view, Padded(), tmp_path, **options)
    assert counts == items, "the loss is averaged over the same number of targets"
    assert losses == pytest.approx(wanted, rel=1e-6)
    for (name, ours), theirs, before in zip(
        packed.named_parameters(), unpacked.parameters(), start.parameters(), strict=True
    ):
        moved = (theirs - before).norm()
        assert moved > 0
        # Rotary tables and norms are computed in float32, so this is the bound even in float64.
        assert (ours - theirs).norm() <= 1e-3 * moved, name


def test_workers_collate_and_epochs_go_on(tmp_path):
    view = pack_dataset(make_documents(), max_length=BIGGEST)
    model = tiny_model("llama").train()
    losses, _ = train(
        model, view, DataCollatorForNeatPacking(model), tmp_path,
        dataloader_num_workers=2, dataloader_persistent_workers=True,
    )  # fmt: skip
    assert len(losses) == 10
    assert len(view) < 20, "ten steps of two packs are more than one epoch"


def test_a_written_set_trains_like_the_view(tmp_path):
    view = pack_dataset(make_documents(), max_length=BIGGEST)
    results = []
    for data in (view, pack_dataset(make_documents(), max_length=BIGGEST, materialize=True)):
        model = tiny_model("llama").train()
        results.append(train(model, data, DataCollatorForNeatPacking(model), tmp_path)[0])
    assert results[0] == results[1]
