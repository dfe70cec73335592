"""A Llama in two pipeline stages of torch.distributed.pipelining, trained on packed microbatches."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_processes import record
from distributed_reference import OneProcess, optimizer_of, packs, weights_of
from tiny_models import tiny_model
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hf_neat_packing import DataCollatorForNeatPacking, configure_packing_for_models

MICROBATCHES = 4
STEPS = 2


class Stage(nn.Module):
    """Half of a Llama: embeddings and the first layers, or the last layers and the head."""

    def __init__(self, model, rank):
        super().__init__()
        self.config = model.config
        self.model = copy.deepcopy(model.model)
        middle = len(self.model.layers) // 2
        if rank == 0:
            self.model.layers = self.model.layers[:middle]
            self.model.norm = nn.Identity()
        else:
            self.model.layers = self.model.layers[middle:]
            self.model.embed_tokens = None
            self.lm_head = copy.deepcopy(model.lm_head)

    def forward(self, inputs, **boundaries):
        first = self.model.embed_tokens is not None
        name = "input_ids" if first else "inputs_embeds"
        output = self.model(**{name: inputs}, use_cache=False, **boundaries).last_hidden_state
        return output if first else self.lm_head(output)


def own_names(rank, layers=2):
    """How the weights of a stage are called in the whole model."""
    first = layers // 2
    numbers = range(first) if rank == 0 else range(first, layers)
    return {f"model.layers.{here}.": f"model.layers.{there}." for here, there in enumerate(numbers)}


def in_whole_model(weights, rank):
    renamed = {}
    for name, value in weights.items():
        for here, there in own_names(rank).items():
            if name.startswith(here):
                name = there + name.removeprefix(here)
                break
        renamed[name] = value
    return renamed


def summed_loss(logits, targets):
    """Cross-entropy of a microbatch; its targets come with the share of each in the step's mean."""
    labels, weight = targets[..., 0].long(), targets[..., 1]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=-100
    )
    return (losses * weight[:, 1:].flatten()).sum()


def train(schedule_class, *, boundaries=True):
    """Train this rank's stage for some steps of several microbatches each, all in flight together."""
    rank = dist.get_rank()
    stage = Stage(tiny_model("llama"), rank)
    collator = DataCollatorForNeatPacking(
        contract=configure_packing_for_models([stage]), rows="packs", row_length=32
    )
    packed = packs()
    placed = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = schedule_class(
        placed, n_microbatches=MICROBATCHES, loss_fn=summed_loss, scale_grads=False
    )
    optimizer = optimizer_of(stage)
    for step in range(STEPS):
        batch = collator([packed[pack] for pack in packs_of(step)])
        inputs, labels = batch.pop("input_ids"), batch.pop("labels")
        share = torch.full(labels.shape, 1 / int((labels[:, 1:] != -100).sum()))
        targets = torch.stack([labels.float(), share], dim=-1)
        batch = batch if boundaries else {}
        if rank == 0:
            schedule.step(inputs, **batch)
        else:
            schedule.step(target=targets, **batch)
        optimizer.step()
        optimizer.zero_grad()
    return in_whole_model(weights_of(stage), rank)


def packs_of(step):
    return range(step, step + MICROBATCHES)


def check_pipelines(folder: Path):
    """GPipe and 1F1B against ONE process on the same documents unpacked."""
    packed = packs()
    steps = [
        [torch.tensor(ids.tolist()) for pack in packs_of(step) for ids in packed[pack]["input_ids"]]
        for step in range(STEPS)
    ]
    one = OneProcess(tiny_model("llama", "sdpa"), steps)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        weights = train(schedule)
        record(
            folder,
            dist.get_rank(),
            schedule.__name__,
            excess=one.excess(weights),
            control=one.excess(train(schedule, boundaries=False)),
            parameters=len(weights),
            all_parameters=len(one.start),
        )
