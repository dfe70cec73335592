"""Documents of a row regrouped into padded calls of near lengths, and back.

A layer that carries state from token to token is run on `[documents, longest, ...]` instead of the row.
Documents of near lengths share a call, so that padding stays a small part of the tokens. Padding lies
behind the document and repeats its last token: a causal layer never looks there, and a real token makes no
NaN that a zero vector might.

Legend: `B` rows, `S` tokens in a row, `D` documents of a call, `W` its width, `T` = `B * S`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.mask_entry import LazyMask
from .running import RowLayout

MAX_PADDING = 0.12
"""Padding that regrouping may add, as a share of the row's tokens."""

CALL_TOKENS = 256
"""Padding that is cheaper than one more call of a layer."""


@dataclass(frozen=True)
class Call:
    """One call of a layer: which documents, in what width.

    Attributes:
        documents: numbers of the documents in the layout.
        width: tokens that each is padded to.
        source: int64 `[D * W]`, the token of the flattened batch in each slot.
        layout: one document a row.
    """

    documents: tuple[int, ...]
    width: int
    source: Tensor
    layout: RowLayout


@dataclass(frozen=True)
class Regrouping:
    """All calls of a layer for one layout.

    Attributes:
        calls: the calls, narrow ones first.
        slot: int64 `[T]`, where in the joined outputs each token of the batch is.
        layout: the layout of the batch.
    """

    calls: tuple[Call, ...]
    slot: Tensor
    layout: RowLayout

    @property
    def padding(self) -> float:
        """Padding slots as a share of the documents' tokens."""
        return sum(call.source.numel() for call in self.calls) / sum(self.layout.lengths) - 1


Groups = Callable[[tuple[int, ...]], Sequence[Sequence[int]]]
"""Puts document numbers into groups, given their lengths."""


@lru_cache(maxsize=256)
def near_lengths(
    lengths: tuple[int, ...], max_padding: float = MAX_PADDING, call_tokens: int = CALL_TOKENS
) -> tuple[tuple[int, ...], ...]:
    """Group documents of near lengths: as few groups as a budget of padding allows.

    Args:
        lengths: document lengths.
        max_padding: budget as a share of the tokens.
        call_tokens: budget in tokens that is always granted, at most once the row's own tokens.

    Returns:
        Document numbers, the shortest documents first.
    """
    widths, counts = (list(part) for part in np.unique(np.asarray(lengths), return_counts=True))
    total = sum(lengths)
    budget = max(int(max_padding * total), min(call_tokens, total))
    while len(widths) > 1:
        # Lifting a group to the next width costs the difference for each of its documents.
        costs = np.asarray(counts[:-1]) * np.diff(widths)
        cheapest = int(costs.argmin())
        if costs[cheapest] > budget:
            break
        budget -= int(costs[cheapest])
        counts[cheapest + 1] += counts[cheapest]
        del widths[cheapest], counts[cheapest]
    group_of = np.searchsorted(np.asarray(widths), np.asarray(lengths))
    return tuple(tuple(np.flatnonzero(group_of == group).tolist()) for group in range(len(widths)))


def equal_lengths(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group documents of one length each, so that no call is padded."""
    return near_lengths(lengths, 0.0, 0)


def regroup(layout: RowLayout, groups: Groups, device: torch.device) -> Regrouping:
    """Plan the calls for a layout; the plan is kept with the layout, so every layer shares it.

    Args:
        layout: the documents.
        groups: which of them share a call.
        device: where the tokens are.
    """
    key = ("regrouping", groups, device)
    if key not in layout.cached:
        layout.cached[key] = _plan(layout, groups(layout.lengths), device)
    return layout.cached[key]  # type: ignore[no-any-return]


def _plan(layout: RowLayout, groups: Sequence[Sequence[int]], device: torch.device) -> Regrouping:
    starts, lengths = layout.starts(), layout.lengths
    slot = torch.zeros(layout.rows * layout.row_length, dtype=torch.int64)
    calls, done = [], 0
    for group in groups:
        width = max(lengths[document] for document in group)
        start = torch.tensor([starts[document] for document in group])[:, None]
        length = torch.tensor([lengths[document] for document in group])[:, None]
        within = torch.arange(width)
        source = start + torch.minimum(within, length - 1)
        slots = (done + torch.arange(source.numel())).reshape(source.shape)
        slot[source[within < length]] = slots[within < length]
        if layout.padded:
            _slots_of_padding(slot, layout, group, slots)
        done += source.numel()
        inner = RowLayout(
            len(group), width, tuple(lengths[document] for document in group), padded=True
        )
        calls.append(Call(tuple(group), width, source.reshape(-1).to(device), inner))
    return Regrouping(tuple(calls), slot.to(device), layout)


def _slots_of_padding(slot: Tensor, layout: RowLayout, group: Sequence[int], slots: Tensor) -> None:
    """Give padding the output of the last token before it."""
    for row, document in enumerate(group):
        length = layout.lengths[document]
        first = document * layout.row_length
        slot[first + length : first + layout.row_length] = slots[row, length - 1]


def take(value: Any, call: Call, layout: RowLayout) -> Any:
    """Move the per-token parts of an argument from the rows into the slots of a call.

    Tensors `[B, S, ...]`, `[1, S, ...]`, multi-axis positions `[3 or 4, B, S]` and row counters `[S]` are moved,
    inside lists, tuples and dicts too; everything else is left as it is. Masks are not handled here.
    """
    if isinstance(value, Tensor):
        return _take_tensor(value, call, layout)
    return _map_inside(value, lambda part: take(part, call, layout))


def is_per_token(value: Any, layout: RowLayout) -> bool:
    """Whether a value is a tensor with one entry per token of the batch."""
    return isinstance(value, Tensor) and tuple(value.shape[:2]) == (layout.rows, layout.row_length)


def _take_tensor(value: Tensor, call: Call, layout: RowLayout) -> Tensor:
    rows, length = layout.rows, layout.row_length
    size = (len(call.documents), call.width)
    if value.ndim >= 2 and value.shape[1] == length and value.shape[0] in (1, rows):
        flat = value.expand(rows, *value.shape[1:]).reshape(rows * length, *value.shape[2:])
        return flat.index_select(0, call.source).reshape(*size, *value.shape[2:])
    multi_axis = value.ndim == 3 and value.shape[0] in (3, 4) and value.shape[2] == length
    if multi_axis and value.shape[1] in (1, rows) and not value.is_floating_point():
        flat = value.expand(-1, rows, -1).reshape(value.shape[0], rows * length)
        return flat.index_select(1, call.source).reshape(value.shape[0], *size)
    if value.ndim == 1 and value.shape[0] == length and not value.is_floating_point():
        return value[: call.width]
    return value


def cut_mask(mask: Tensor, call: Call, layout: RowLayout) -> Tensor:
    """Cut the documents' blocks out of a mask `[1 or B, heads, S, S]`.

    Returns:
        `[D, heads, W, W]`; padding is hidden from real tokens.
    """
    starts = layout.starts()
    blocks = []
    for document in call.documents:
        row, first = divmod(starts[document], layout.row_length)
        length = layout.lengths[document]
        if isinstance(mask, LazyMask):
            block = mask.recipe.block(starts[document], starts[document] + length)[0]
        else:
            whole = mask[row if mask.shape[0] > 1 else 0]
            block = whole[:, first : first + length, first : first + length]
        blocks.append(_pad_block(block, call.width))
    return torch.stack(blocks)


def _pad_block(block: Tensor, width: int) -> Tensor:
    heads, length, _ = block.shape
    hidden: Any = False if block.dtype == torch.bool else torch.finfo(block.dtype).min
    padded = block.new_full((heads, width, width), hidden)
    padded[:, :length, :length] = block
    padded[:, length:, :length] = block[:, -1:, :]
    return padded


def put(outputs: Sequence[Any], regrouping: Regrouping) -> Any:
    """Move the outputs of all calls back into the rows.

    Args:
        outputs: one output per call, of one structure: tensors `[D, W, ...]` or `[D * W, ...]`, inside lists,
            tuples and dicts too. Anything else is taken from the first call.
        regrouping: the calls that the outputs belong to.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _put_tensors(outputs, regrouping)
    if isinstance(first, Mapping):
        parts = {name: put([output[name] for output in outputs], regrouping) for name in first}
        return type(first)(**parts) if type(first) is not dict else parts
    if isinstance(first, (tuple, list)):
        joined = [put(parts, regrouping) for parts in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first


def _put_tensors(outputs: Sequence[Tensor], regrouping: Regrouping) -> Tensor:
    calls, layout = regrouping.calls, regrouping.layout
    pairs = list(zip(outputs, calls, strict=True))
    if all(tuple(o.shape[:2]) == (len(call.documents), call.width) for o, call in pairs):
        flat = torch.cat([output.flatten(0, 1) for output in outputs])
        laid = flat.index_select(0, regrouping.slot)
        return laid.reshape(layout.rows, layout.row_length, *flat.shape[1:])
    if all(o.ndim >= 2 and o.shape[0] == call.source.numel() for o, call in pairs) and (
        len({output.shape[1:] for output in outputs}) == 1
    ):
        return torch.cat(list(outputs)).index_select(0, regrouping.slot)
    return outputs[0]


def _map_inside(value: Any, function: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {name: function(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)) and any(
        isinstance(part, (Tensor, tuple, list)) for part in value
    ):
        parts = [function(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
