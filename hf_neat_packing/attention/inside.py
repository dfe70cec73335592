"""What a query sees inside its own document: windows, chunks, masks, biases, chosen keys.

Each is cut to one document at a time, so nothing of the size of the row squared is made that the model
had not made itself.

Legend: see `forward`.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedAttentionError
from .boundaries import Boundaries
from .kernels import DocumentMask
from .mask_entry import LazyMask

# Stands for the first and last key of a query whose keys are not one interval.
NO_INTERVAL = -2


class Reach(NamedTuple):
    """What a query sees inside its document.

    Attributes:
        left: keys before the query (None: back to the document's start).
        right: keys after it (None: to the document's end; 0: causal).
        chunk: tokens of an attention chunk counted from the document's start, or None.
        mask: the mask of a document where these cannot say it; `left` and `right` are then None.
    """

    left: int | None
    right: int | None
    chunk: int | None = None
    mask: DocumentMask | None = None


def reach(attention_mask: Any, causal: bool, sliding_window: int | None) -> Reach:
    """Say what a query sees inside its document, from the mask of the call or without one.

    Raises:
        UnsupportedAttentionError: a mask that cannot be read beside boundaries.
    """
    if attention_mask is None:
        if sliding_window is not None and not causal:
            raise UnsupportedAttentionError(
                f"A bidirectional attention came with sliding_window={sliding_window} and no mask: whether the window "
                "counts both sides is not defined without one. Build the mask with "
                "transformers' create_bidirectional_sliding_window_mask."
            )
        left = None if sliding_window is None else sliding_window - 1
        return Reach(left, 0 if causal else None)
    if isinstance(attention_mask, LazyMask):
        recipe = attention_mask.recipe
        if recipe.pattern is None:
            return Reach(None, None, mask=recipe.block)
        return Reach(recipe.pattern.left, recipe.pattern.right, recipe.pattern.chunk)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        shape = (
            list(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise UnsupportedAttentionError(
            f"Attention got boundaries beside an attention_mask of {shape}. Only 4-D masks ([batch, heads, queries, "
            "keys]) can be read beside them. Send no attention_mask beside varlen kwargs."
        )
    mask = attention_mask

    def block(start: int, stop: int) -> Tensor:
        row, first = divmod(start, mask.shape[2])
        rows = mask[row : row + 1] if mask.shape[0] > 1 else mask
        return rows[:, :, first : first + stop - start, first : first + stop - start]

    return Reach(None, None, mask=block)


def window_mask(left: int | None, right: int | None, device: torch.device) -> DocumentMask:
    """Say a window as the mask of a document."""

    def block(start: int, stop: int) -> Tensor:
        token = torch.arange(stop - start, device=device)
        distance = token[None, :] - token[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen[None, None]

    return block


def with_bias(bias: Tensor, mask: DocumentMask, row_length: int) -> DocumentMask:
    """Add a position bias to what a query sees; a relative bias is the same on every diagonal block.

    Args:
        bias: additive, `[1 or B, H, S, S]`.
        mask: what is seen.
        row_length: `S`.
    """

    def block(start: int, stop: int) -> Tensor:
        row, first = divmod(start, row_length)
        last = first + stop - start
        rows = bias[row : row + 1] if bias.shape[0] > 1 else bias
        piece, seen = rows[:, :, first:last, first:last], mask(start, stop)
        if seen.dtype != torch.bool:
            return piece + seen
        return torch.where(seen, piece, torch.finfo(bias.dtype).min)

    return block


def only_chosen(indices: Tensor, mask: DocumentMask) -> DocumentMask:
    """Keep only the keys that an indexer chose for each query, where they are seen.

    Args:
        indices: integer `[B, S, chosen]`, keys of the row.
        mask: what is seen.
    """
    row_length = indices.shape[1]

    def block(start: int, stop: int) -> Tensor:
        row, first = divmod(start, row_length)
        length = stop - start
        chosen = indices[row, first : first + length].long() - first
        # Keys of other documents go to a column that is cut off.
        chosen = torch.where((chosen >= 0) & (chosen < length), chosen, length)
        kept = torch.zeros(length, length + 1, dtype=torch.bool, device=indices.device)
        kept = kept.scatter_(1, chosen, value=True)[None, None, :, :length]
        seen = mask(start, stop)
        if seen.dtype == torch.bool:
            return seen & kept
        return seen.masked_fill(~kept, torch.finfo(seen.dtype).min)

    return block


def mask_of_chosen(
    indices: Tensor, attention_mask: Any, num_keys: int, *, is_causal: bool
) -> Tensor:
    """Build the mask of an unpacked call in which an indexer chose the keys, `[B, 1, S, S']`."""
    rows, queries = indices.shape[:2]
    kept = torch.zeros(rows, queries, num_keys, dtype=torch.bool, device=indices.device)
    kept = kept.scatter_(-1, indices.long(), value=True)[:, None]
    mask: Tensor | None = attention_mask
    if isinstance(mask, LazyMask):
        mask = mask.recipe.dense()
    if mask is None:
        return kept.tril(num_keys - queries) if is_causal else kept
    mask = mask[..., :num_keys]
    if mask.dtype == torch.bool:
        return kept & mask
    return mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


def cut_into_chunks(boundaries: Boundaries, chunk: int, device: torch.device) -> Boundaries:
    """Chunked attention is attention inside chunks that are counted from each document's start."""
    lengths = boundaries.lengths
    if lengths is None:
        lengths = tuple(boundaries.cu_seqlens.diff().tolist())
    pieces = tuple(
        min(chunk, length - first) for length in lengths for first in range(0, length, chunk)
    )
    offsets = torch.tensor([0, *itertools.accumulate(pieces)], dtype=torch.int32, device=device)
    return Boundaries(offsets, max(pieces), pieces, boundaries.source)


def interval_of(mask: Tensor) -> Tensor:
    """Read a boolean mask as one interval of keys for every query.

    Args:
        mask: bool `[1 or B, 1, S, S]`.

    Returns:
        int32 `[2, 1 or B, S]`, first and last key; `NO_INTERVAL` twice where the keys are not one interval. A
        query that sees nothing (padding) gets itself.
    """
    seen = mask[:, 0]
    size = mask.shape[-1]
    keys = torch.arange(size, device=mask.device, dtype=torch.int32)
    first = torch.where(seen, keys, size).amin(-1).to(torch.int32)
    last = torch.where(seen, keys, -1).amax(-1).to(torch.int32)
    count = seen.sum(-1, dtype=torch.int32)
    queries = keys[: mask.shape[-2]].expand_as(first)
    first, last = (torch.where(count == 0, queries, x) for x in (first, last))
    broken = (count > 0) & (count != last - first + 1)
    return torch.stack([x.masked_fill(broken, NO_INTERVAL) for x in (first, last)])


def in_stream(interval: Tensor, num_tokens: int) -> Tensor:
    """Count the keys of intervals in the flattened rows instead of each row.

    Args:
        interval: integer `[2, 1 or B, S]`; one row stands for all.
        num_tokens: `B * S`.

    Returns:
        `[2, B * S]`.
    """
    size = interval.shape[2]
    rows = torch.arange(num_tokens // size, device=interval.device)
    return (interval + rows[:, None] * size).flatten(1)
