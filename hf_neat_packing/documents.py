"""The document map: which document owns each token of each row.

A *document map* is an integer tensor `[B, S]`: the 1-based number of the document that owns each
token, restarting in every row; 0 marks padding. Offsets (`offsets`) and positions (`positions`) follow from it.

Everything here is pure. A map on an accelerator is copied to the host once (one synchronisation per
call) and the result goes back to the map's device.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BoundaryError


class Runs(NamedTuple):
    """Runs of equal ids along the rows, on the host. Starts are indices into `[B*S]`."""

    host: Tensor  # int64 [B, S], the map itself
    starts: Tensor  # int64 [R]
    lengths: Tensor  # int64 [R]
    ids: Tensor  # int64 [R]


def host_map(document_map: Tensor) -> Tensor:
    """Copy a map to the host as int64 `[B, S]`, refusing other ranks and floats."""
    if document_map.ndim != 2:
        raise BoundaryError(
            f"A document map must have shape [batch, sequence], got {list(document_map.shape)}. "
            "Give one row per packed sequence, e.g. torch.tensor([[1, 1, 2, 2, 2, 0]])."
        )
    if document_map.is_floating_point() or document_map.is_complex():
        raise BoundaryError(
            f"A document map must hold integers (1-based document numbers, 0 = padding), got "
            f"{document_map.dtype}. Convert it with `.long()` if its values are whole numbers."
        )
    return document_map.detach().to("cpu", torch.int64)


def runs_of(host: Tensor) -> Runs:
    """Find maximal runs of one id, padding included; a row start always begins a run."""
    flat = host.reshape(-1)
    if flat.numel() == 0:
        empty = flat.new_empty(0)
        return Runs(host, empty, empty, empty)
    is_start = torch.ones_like(host, dtype=torch.bool)
    is_start[:, 1:] = host[:, 1:] != host[:, :-1]
    starts = is_start.reshape(-1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([flat.numel()]))
    return Runs(host, starts, lengths, flat[starts])


def check_ids(host: Tensor, starts: Tensor, ids: Tensor, *, what: str) -> None:
    """Refuse negative ids and ids that come back after another document."""
    if ids.numel() == 0:
        return
    if int(ids.min()) < 0:
        row = int(starts[ids < 0][0]) // host.shape[1]
        raise BoundaryError(
            f"Document map row {row} holds the id {int(ids.min())}. Ids are 1-based document numbers and "
            "0 is padding; a negative id belongs to no document, so its tokens would be lost. "
            "Write 0 where a token is padding."
        )
    rows = starts // host.shape[1]
    keys = rows * (ids.max() + 1) + ids
    unique, counts = keys.unique(return_counts=True)
    if unique.numel() != keys.numel():
        again = unique[counts > 1][0]
        row, document = divmod(int(again), int(ids.max()) + 1)
        raise BoundaryError(
            f"Document {document} of row {row} comes back after {what}: "
            f"{host[row].tolist() if host.shape[1] <= 64 else 'row too long to print'}. "
            "Its tokens would be cut into two sequences that do not see each other. "
            "Give every document one uninterrupted run, or a new id to the second part."
        )


def documents(host: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return real tokens `[T]`, document starts into them `[N]` and the row of each document `[N]`.

    Padding inside a document does not end it: it is gathered away.
    """
    flat = host.reshape(-1)
    tokens = flat.nonzero().squeeze(1)
    if tokens.numel() == 0:
        return tokens, tokens, tokens
    rows, ids = tokens // host.shape[1], flat[tokens]
    is_start = torch.ones_like(tokens, dtype=torch.bool)
    is_start[1:] = (rows[1:] != rows[:-1]) | (ids[1:] != ids[:-1])
    starts = is_start.nonzero().squeeze(1)
    check_ids(host, tokens[starts], ids[starts], what="another document")
    return tokens, starts, rows[starts]


def binary_to_map(attention_mask: Tensor) -> Tensor:
    """A bool or 0/1 mask is a map already: every row is one document."""
    return attention_mask.to(torch.int64) if attention_mask.dtype == torch.bool else attention_mask


def require_tokens(host: Tensor) -> None:
    """Refuse a mask in which every entry is padding."""
    if host.numel() == 0 or not bool((host != 0).any()):
        raise BoundaryError(
            f"The mask of shape {list(host.shape)} holds no real token: every entry is 0 (padding). "
            "Nothing can be attended to. Drop the batch before the model sees it."
        )


def lengths_to_document_map(
    lengths: Sequence[Sequence[int]], *, row_length: int | None = None
) -> Tensor:
    """Build a document map from the document lengths of each row.

    Args:
        lengths: for each row, the tokens of its documents in order.
        row_length: tokens of a row; the tail is padding. Default: the longest row.

    Returns:
        int64 `[B, S]`, 1-based ids in order, 0 in the tail.

    Raises:
        BoundaryError: a negative length, or a row that does not fit into `row_length`.

    Example:
        >>> lengths_to_document_map([[2, 3], [1]], row_length=6)
        tensor([[1, 1, 2, 2, 2, 0],
                [1, 0, 0, 0, 0, 0]])
    """
    rows = [torch.as_tensor(list(row), dtype=torch.int64) for row in lengths]
    if any(row.numel() and int(row.min()) < 0 for row in rows):
        raise BoundaryError("Document lengths must be 0 or more tokens.")
    rows = [row[row > 0] for row in rows]
    totals = [int(row.sum()) for row in rows]
    width = max(totals, default=0) if row_length is None else row_length
    if totals and max(totals) > width:
        raise BoundaryError(
            f"Row {totals.index(max(totals))} holds {max(totals)} tokens but rows have {width}. "
            "Pack with this capacity, or ask for longer rows."
        )
    document_map = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids = torch.arange(1, row.numel() + 1)
        document_map[index, : totals[index]] = torch.repeat_interleave(ids, row)
    return document_map


def get_seqlens_in_batch(attention_mask: Tensor) -> Tensor:
    """List the lengths of the documents of a batch, in the order in which they lie in the rows.

    Args:
        attention_mask: document map `[B, S]`; a bool or 0/1 mask is one document per row.

    Returns:
        int64 `[N]` on the mask's device; empty where there is no token.

    Raises:
        BoundaryError: not a map, a negative id, or an id that comes back after another document.

    Example:
        >>> get_seqlens_in_batch(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        tensor([2, 3, 1, 2, 3])
    """
    tokens, starts, _ = documents(host_map(binary_to_map(attention_mask)))
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    return lengths.to(attention_mask.device)
