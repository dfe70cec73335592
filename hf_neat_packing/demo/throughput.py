"""Real tokens per second of a training step, three ways in turn, on the same documents."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_neat_packing._compat import tree_map
from hf_neat_packing.collator import DataCollatorForNeatPacking

PADDED_BATCH = 8
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Speed:
    """How fast one way of batching the documents is.

    Attributes:
        name: `neat_varlen`, `sdpa, packed` or `sdpa, padded`.
        tokens_per_second: Real tokens per second, forward and backward, padding not counted.
        computed_tokens: Tokens computed, padding counted.
        loss: Mean loss of the documents, which must be the same for all.
    """

    name: str
    tokens_per_second: float
    computed_tokens: int
    loss: float


@dataclass(frozen=True)
class Way:
    """One way of batching: the attention key, and the batches that hold all the documents."""

    name: str
    attention: str
    batches: list[dict[str, Any]]


def compare_speeds(
    model: Any, pack: Mapping[str, Sequence[Any]], *, rounds: int = 3, pad_token_id: int = 0
) -> list[Speed]:
    """Time forward and backward of one pack's documents by `neat_varlen`, packed sdpa and padding.

    The three take turns, and each figure is a median over the rounds. The weights stay as they are.

    Args:
        model: A model that runs with `neat_varlen` and `sdpa`.
        pack: Nested columns, as `pack_dataset` gives.
        rounds: Turns of each.
        pad_token_id: Token id of the padding.

    Returns:
        `neat_varlen` first, then packed rows under sdpa, then batches of 8 padded to their longest.
    """
    ways = ways_of(model, pack, pad_token_id=pad_token_id)
    real = sum(len(document) for document in pack["input_ids"])
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    losses: dict[str, float] = {}
    was_training = model.training
    # Dropout would make the losses differ.
    model.eval()
    for _ in range(rounds):
        for way in ways:
            model.set_attn_implementation(way.attention)
            elapsed, losses[way.name] = timed_step(model, way.batches)
            seconds[way.name].append(elapsed)
    model.set_attn_implementation(ways[0].attention)
    model.train(was_training)
    return [
        Speed(
            name=way.name,
            tokens_per_second=real / statistics.median(seconds[way.name]),
            computed_tokens=sum(batch["input_ids"].numel() for batch in way.batches),
            loss=losses[way.name],
        )
        for way in ways
    ]


def ways_of(model: Any, pack: Mapping[str, Sequence[Any]], *, pad_token_id: int) -> list[Way]:
    """Batch the documents of one pack in three ways, for the model as it is.

    Args:
        model: The model; its attention key is `neat_varlen` afterwards.
        pack: Nested columns with `input_ids`.
        pad_token_id: Token id of the padding.
    """
    pack = {"input_ids": pack["input_ids"]}
    model.set_attn_implementation("sdpa")
    masked = DataCollatorForNeatPacking(model)([pack])
    model.set_attn_implementation("neat_varlen")
    packed = DataCollatorForNeatPacking(model)([pack])
    # A copy: packs are read-only views, and torch warns of them.
    documents = [torch.tensor(np.array(ids, dtype=np.int64)) for ids in pack["input_ids"]]
    padded = [
        _pad(documents[first : first + PADDED_BATCH], pad_token_id)
        for first in range(0, len(documents), PADDED_BATCH)
    ]
    return [
        Way("neat_varlen", "neat_varlen", [packed]),
        Way("sdpa, packed", "sdpa", [masked]),
        Way("sdpa, padded", "sdpa", padded),
    ]


def _pad(documents: Sequence[Tensor], pad_token_id: int) -> dict[str, Any]:
    """Pad documents on the right to the longest of them."""
    pad = torch.nn.utils.rnn.pad_sequence
    ones = [torch.ones_like(document) for document in documents]
    return {
        "input_ids": pad(list(documents), batch_first=True, padding_value=pad_token_id),
        "labels": pad(list(documents), batch_first=True, padding_value=IGNORE_INDEX),
        "attention_mask": pad(ones, batch_first=True),
    }


def timed_step(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Run forward and backward of all batches.

    Args:
        model: The model; its gradients are cleared afterwards.
        batches: What its forward takes, `labels` included.

    Returns:
        Seconds, and the mean loss over all labels.
    """
    device = next(model.parameters()).device
    batches = [on_device(batch, device) for batch in batches]
    counts = [int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches]
    _wait(device)
    start = time.perf_counter()
    total = torch.zeros((), device=device)
    for batch, count in zip(batches, counts, strict=True):
        if not count:
            # Documents of one token have nothing to predict, and the mean of nothing is no number.
            continue
        loss = model(**batch).loss * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    _wait(device)
    elapsed = time.perf_counter() - start
    model.zero_grad()
    return elapsed, float(total)


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move every tensor of a batch, nested masks too.

    Args:
        batch: What a forward takes.
        device: Where to.
    """
    moved: dict[str, Any] = tree_map(
        lambda value: value.to(device) if isinstance(value, Tensor) else value, dict(batch)
    )
    return moved


def _wait(device: torch.device) -> None:
    """Let an accelerator finish, so that the clock sees its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
