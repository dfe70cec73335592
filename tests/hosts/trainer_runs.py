"""The real Trainer on packs, and its controls: the same documents unpacked, and packs whose boundaries were lost."""

import functools
import random

import datasets
import torch
import transformers
from tiny_models import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neat_packing import DataCollatorForNeatPacking, pack_dataset

MAX_LENGTH = 32


def quiet():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()


@functools.cache
def documents(count=40):
    """Documents of which only a part is learned; some of one token, and one of which nothing is learned."""
    rng = random.Random(0)
    made = []
    for index in range(count):
        ids = [rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 5, 9, 14, 30]))]
        prompt = len(ids) if index == 7 else rng.randrange(len(ids) // 2 + 1)
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return datasets.Dataset.from_list(made)


@functools.cache
def packs(count=40):
    return pack_dataset(documents(count), max_length=MAX_LENGTH)


class Padded:
    """The control: the documents of each pack as rows of their own, padded on the right."""

    def __call__(self, features):
        rows = [
            (torch.tensor(list(ids)), torch.tensor(list(labels)))
            for pack in features
            for ids, labels in zip(pack["input_ids"], pack["labels"], strict=True)
        ]
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return {
            "input_ids": pad([ids for ids, _ in rows]),
            "attention_mask": pad([torch.ones_like(ids) for ids, _ in rows]),
            "labels": pad([labels for _, labels in rows], padding_value=-100),
        }


class Leaky(DataCollatorForNeatPacking):
    """The control that must fail: one causal row, as if nothing had said where documents begin."""

    def __call__(self, features, **kwargs):
        batch = super().__call__(features, **kwargs)
        return {name: batch[name] for name in ("input_ids", "labels")}


class Watch(TrainerCallback):
    def __init__(self):
        self.losses, self.evaluations, self.norms = [], [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.evaluations.append(metrics)


class CountingTrainer(Trainer):
    """Notes what each update was divided by."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.counts = [*getattr(self, "counts", []), int(num_items_in_batch or 0)]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def arguments(folder, **options):
    options = {
        "per_device_train_batch_size": 2, "max_steps": 10, "logging_steps": 1, "learning_rate": 1e-3,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 3,
    } | options  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **options)


def train(
    model,
    data,
    collator,
    folder,
    *,
    host=CountingTrainer,
    trainer=None,
    callbacks=(),
    resume=None,
    **options,
):
    """Train, and return what the watch saw and what updates were divided by."""
    watch = Watch()
    given = trainer or {}
    running = host(
        model=model.train(), args=arguments(folder, **options), train_dataset=data, data_collator=collator,
        callbacks=[watch, *callbacks], **given,
    )  # fmt: skip
    running.train(resume_from_checkpoint=resume)
    return watch, running.counts


def weights(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def excess(ours, reference, truth, steps):
    """How far weights are from the truth in units of what is allowed; exact: <= 1.

    Allowed is twice the error of unpacked training in the same dtype, and one rounding of every weight in every
    step.
    """
    true = weights(truth)
    dtype = next(ours.parameters()).dtype
    rounding = steps * torch.finfo(dtype).eps / 2 * true.norm()
    allowed = 2 * (weights(reference) - true).norm() + rounding
    return float((weights(ours) - true).norm() / allowed)


@functools.cache
def unpacked(folder, dtype=torch.float32, items=()):
    """The unpacked run of a dtype with some options; several tests compare with it."""
    model = tiny_model("llama", "sdpa", dtype)
    watch, counts = train(model, packs(), Padded(), folder, **dict(items))
    return model, watch, counts
