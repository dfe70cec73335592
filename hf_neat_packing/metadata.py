"""The unpadded metadata bundle: built batch-major in the loader, flattened once at model entry.

Native FlashAttention-4 and recurrent mixers take one flat stream of real tokens. The bundle that
travels is batch-major instead, so that a pipeline schedule that splits every tensor on dimension 0
hands each microbatch boundaries that are right for its own rows.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens.
"""

from typing import TypedDict

import torch
from torch import Tensor

from .documents import binary_to_map, documents, host_map, require_tokens
from .errors import BoundaryError


class PackedSequenceMetadata(TypedDict):
    """Unpadded boundaries of a batch, batch-major.

    Attributes:
        packed_token_indices: int64 `[B, S]`, row-local position of each real token, -1 at padding.
        cu_seqlens: int32 `[B, most documents of a row + 1]`, row-local offsets, -1 where unused.
        max_seqlen: tokens of the longest document of the batch (an upper bound after a split).
    """

    packed_token_indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def build_packed_sequence_metadata(attention_mask: Tensor) -> PackedSequenceMetadata:
    """Build the batch-major bundle of a document map.

    Args:
        attention_mask: document map `[B, S]`; a bool or 0/1 mask is one document per row.

    Returns:
        The bundle, on the mask's device; nothing in it aliases the mask. An empty row has the
        offsets `[0, -1, ...]`.

    Raises:
        BoundaryError: not of rank two, no real token, a negative id, or an id that comes back.

    Example:
        >>> build_packed_sequence_metadata(torch.tensor([[1, 1, 2, 0]]))["cu_seqlens"]
        tensor([[0, 2, 3]], dtype=torch.int32)
    """
    host = host_map(binary_to_map(attention_mask))
    require_tokens(host)
    tokens, starts, rows = documents(host)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    counts = torch.bincount(rows, minlength=host.shape[0])
    first = counts.cumsum(0) - counts
    slot = torch.arange(rows.numel()) - first[rows] + 1
    before_row = torch.zeros(host.shape[0], dtype=torch.int64).index_add_(0, rows, lengths)
    before_row = before_row.cumsum(0) - before_row
    cu_seqlens = torch.full((host.shape[0], int(counts.max()) + 1), -1, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    cu_seqlens[rows, slot] = (lengths.cumsum(0) - before_row[rows]).to(torch.int32)
    positions = torch.arange(host.shape[1]).expand_as(host)
    device = attention_mask.device
    return {
        "packed_token_indices": torch.where(host != 0, positions, -1).to(device),
        "cu_seqlens": cu_seqlens.to(device),
        "max_seqlen": int(lengths.max()),
    }


def flatten_packed_sequence_metadata(
    packed_token_indices: Tensor, cu_seqlens: Tensor, batch_size: int, sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Flatten the bundle into one stream of real tokens, or check one that is flat already.

    Args:
        packed_token_indices: integer `[B, S]` row-local with -1 at padding, or flat `[T]`.
        cu_seqlens: integer `[B, columns]` row-local with -1 where unused, or flat `[N+1]`.
        batch_size: rows of the microbatch (batch-major form).
        sequence_length: tokens of a row of the microbatch (batch-major form).

    Returns:
        int64 `[T]` indices into the flattened `[B*S]`, and offsets `[N+1]` in the dtype of
        `cu_seqlens` (the same object where it was flat). Inputs are not changed.

    Raises:
        BoundaryError: layouts, boundaries or token counts that contradict each other, per row.

    Example:
        >>> flatten_packed_sequence_metadata(
        ...     torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1]]),
        ...     torch.tensor([[0, 1, 3], [0, 2, -1]]), batch_size=2, sequence_length=4)
        (tensor([0, 1, 2, 4, 5]), tensor([0, 1, 3, 5]))
    """
    if packed_token_indices.ndim == 1 and cu_seqlens.ndim == 1:
        _check_flat(packed_token_indices, cu_seqlens)
        return packed_token_indices.to(torch.int64), cu_seqlens
    if packed_token_indices.ndim != 2 or cu_seqlens.ndim != 2:
        raise BoundaryError(
            f"packed_token_indices has shape {list(packed_token_indices.shape)} and cu_seqlens "
            f"{list(cu_seqlens.shape)}: both must be batch-major ([batch, sequence] and [batch, documents + 1]) or "
            "both flat ([tokens] and [documents + 1])."
        )
    if tuple(packed_token_indices.shape) != (batch_size, sequence_length):
        raise BoundaryError(
            f"packed_token_indices has shape {list(packed_token_indices.shape)}, inconsistent with the current "
            f"microbatch of {batch_size} rows of {sequence_length} tokens."
        )
    if cu_seqlens.shape[0] != batch_size or cu_seqlens.shape[1] < 1:
        raise BoundaryError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must have {batch_size} rows, one per row of "
            "packed_token_indices, and at least one column."
        )
    # One copy to the host for both tensors: each would cost a synchronisation of its own.
    both = torch.cat([packed_token_indices, cu_seqlens.to(packed_token_indices.dtype)], dim=1).cpu()
    indices, offsets = both.to(torch.int64).split([sequence_length, cu_seqlens.shape[1]], dim=1)
    _check_batch_major(indices, offsets)
    valid, row_start = indices >= 0, torch.arange(batch_size)[:, None]
    lengths_before = valid.sum(1).cumsum(0) - valid.sum(1)
    used = offsets >= 0
    used[:, 0] = False
    flat_offsets = torch.cat([offsets.new_zeros(1), (offsets + lengths_before[:, None])[used]])
    device = packed_token_indices.device
    return (
        (indices + row_start * sequence_length)[valid].to(device),
        flat_offsets.to(device=device, dtype=cu_seqlens.dtype),
    )


def _check_flat(indices: Tensor, cu_seqlens: Tensor) -> None:
    if cu_seqlens.numel() < 2:
        raise BoundaryError(
            f"Flat cu_seqlens has {cu_seqlens.numel()} offset(s); at least two are needed."
        )
    both = torch.cat([indices, cu_seqlens.to(indices.dtype)]).cpu()
    flat, offsets = both.split([indices.numel(), cu_seqlens.numel()])
    if int(offsets[0]) != 0 or int(offsets[-1]) != indices.numel() or _falls(offsets):
        raise BoundaryError(
            f"Flat cu_seqlens {offsets.tolist()[:16]} must start at 0, never fall and end at the number of "
            f"indices ({indices.numel()})."
        )
    if indices.numel() and (int(flat[0]) < 0 or bool((flat[1:] <= flat[:-1]).any())):
        raise BoundaryError(
            "Flat packed_token_indices must be non-negative and rise strictly: a repeated or negative index "
            "would read a token twice or outside the row."
        )


def _falls(offsets: Tensor) -> bool:
    return bool((torch.diff(offsets) < 0).any())


def _check_batch_major(indices: Tensor, offsets: Tensor) -> None:
    """Check every row by itself: totals that agree by chance hide two wrong rows."""
    used = offsets >= 0
    if not bool((offsets[:, 0] == 0).all()):
        raise BoundaryError(
            f"Every row of cu_seqlens must start at 0, got {offsets[:, 0].tolist()}."
        )
    if bool((used[:, 1:] & ~used[:, :-1]).any()):
        raise BoundaryError(
            "cu_seqlens has an offset after an unused (-1) one; unused entries come last."
        )
    if bool(((offsets[:, 1:] < offsets[:, :-1]) & used[:, 1:]).any()):
        raise BoundaryError(
            f"cu_seqlens falls inside a row: {offsets.tolist()[:4]}. Offsets never go back."
        )
    if not bool(used[:, 1:].any()):
        raise BoundaryError(
            "The microbatch holds no document: every row is padding, and an all-padding microbatch cannot be "
            "flattened. Put at least one document into each microbatch, or drop the batch."
        )
    tokens = (indices >= 0).sum(1)
    last = offsets.gather(1, used.sum(1, keepdim=True) - 1).squeeze(1)
    if not bool((last == tokens).all()):
        row = int((last != tokens).nonzero()[0, 0])
        raise BoundaryError(
            f"Row {row} of cu_seqlens ends at {int(last[row])} but packed_token_indices holds {int(tokens[row])} "
            "tokens there. Build both from one document map with `build_packed_sequence_metadata`."
        )
    if int(indices.max()) >= indices.shape[1]:
        raise BoundaryError(
            f"packed_token_indices holds {int(indices.max())} in rows of {indices.shape[1]} tokens; row-local indices "
            "must stay inside their row, or they would read the next one."
        )
    rising = torch.where(indices >= 0, indices, -1).cummax(1).values[:, :-1]
    if bool(((indices[:, 1:] >= 0) & (indices[:, 1:] <= rising)).any()):
        raise BoundaryError("packed_token_indices must rise strictly inside each row.")
