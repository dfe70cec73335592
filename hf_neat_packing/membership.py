"""Membership in a document map: tokens taken out of it, documents of a row joined.

Pure functions on `[B, S]` maps; tensors are replaced, never written into.

Legend: `B` rows, `S` tokens in a row, `N` documents, `A` position axes.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .documents import documents, host_map
from .errors import BoundaryError


def select_membership(document_map: Tensor, eligible: Tensor | None = None) -> Tensor:
    """Take tokens out of attention, such as the image tokens that a processor put in.

    Args:
        document_map: integer `[B, S]`.
        eligible: bool `[B, S]`, False where a token neither attends nor is attended to; None: all are.

    Returns:
        A new map, 0 where a token is padding or left out.

    Raises:
        BoundaryError: no map, or an `eligible` of another shape or dtype.

    Example:
        >>> select_membership(
        ...     torch.tensor([[1, 1, 1, 2, 0]]), torch.tensor([[True, False, True, True, True]]))
        tensor([[1, 0, 1, 2, 0]])
    """
    documents(host_map(document_map))
    if eligible is None:
        return document_map.clone()
    if eligible.dtype != torch.bool or eligible.shape != document_map.shape:
        raise BoundaryError(
            f"Eligibility must be bool of the map's shape {list(document_map.shape)}, got {eligible.dtype} of "
            f"{list(eligible.shape)}. Write `mask.bool()`, aligned with the tokens after shifting and padding."
        )
    return document_map.masked_fill(~eligible, 0)


def group_map(document_map: Tensor, keys: Sequence[Sequence[Hashable]]) -> Tensor:
    """Write one key per document, such as its `conversation_id`, as a map of groups.

    Args:
        document_map: integer `[B, S]`.
        keys: for each row, the key of each document in order; equal keys are one group, None joins nothing.

    Returns:
        int64 `[B, S]` on the map's device: 1-based group numbers of each row, 0 at padding.

    Raises:
        BoundaryError: another number of keys than documents.

    Example:
        >>> group_map(torch.tensor([[1, 1, 2, 3, 0]]), [["a", "a", "b"]])
        tensor([[1, 1, 1, 2, 0]])
    """
    host = host_map(document_map)
    tokens, starts, rows = documents(host)
    counts = torch.bincount(rows, minlength=host.shape[0]).tolist()
    if [len(row) for row in keys] != counts:
        raise BoundaryError(
            f"The rows hold {counts} documents but {[len(row) for row in keys]} group keys. Give one key for each "
            "document of each row, in the order in which they lie."
        )
    numbers = []
    for row in keys:
        seen: dict[Any, int] = {}
        for key in row:
            # A fresh object is equal to nothing else, so None stays by itself.
            numbers.append(seen.setdefault(object() if key is None else key, len(seen) + 1))
    groups = torch.zeros(host.numel(), dtype=torch.int64)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    groups[tokens] = torch.repeat_interleave(torch.tensor(numbers, dtype=torch.int64), lengths)
    return groups.reshape(host.shape).to(document_map.device)


def join_documents(
    document_map: Tensor,
    position_ids: Tensor,
    *,
    groups: Tensor | None = None,
    membership: Tensor | None = None,
    position_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Let documents of a row see each other: one id for all, positions one after the other.

    The positions of each document are moved behind the largest position of the documents before it, over
    all its axes and by the same step on each. In the four-axis form the first axis counts tokens and is moved by
    itself.

    Args:
        document_map: integer `[B, S]`, the documents whose positions are local.
        position_ids: integer `[B, S]` or `[A, B, S]`, each document from `position_start`.
        groups: integer `[B, S]` from `group_map`, which documents see each other; None: all of a row.
        membership: a map from `select_membership`; None: `document_map`. Tokens left out stay out.
        position_start: position of a document's first token.

    Returns:
        The joined map int64 `[B, S]`, numbered from 1 in each row, and the moved positions; both new.

    Raises:
        BoundaryError: shapes that differ, positions that are not local, or a group with another one in between.

    Example:
        >>> ids, positions = torch.tensor([[1, 1, 1, 2, 2, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
        >>> join_documents(ids, positions)
        (tensor([[1, 1, 1, 1, 1, 0]]), tensor([[0, 1, 2, 3, 4, 0]]))
    """
    host = host_map(document_map)
    tokens, starts, rows = documents(host)
    _require_shapes(document_map, position_ids, groups, membership)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    number = torch.repeat_interleave(torch.arange(starts.numel()), lengths)
    group = _group_of_documents(groups, host, tokens, starts, number)
    first = _first_of_group(rows, group)
    joined = torch.zeros(host.numel(), dtype=torch.int64)
    joined[tokens] = _numbers_in_row(rows, first)[number]
    if membership is not None:
        joined[host_map(membership).reshape(-1) == 0] = 0
    positions = position_ids.detach().cpu().to(torch.int64).reshape(-1, host.numel())
    moved = positions.clone()
    for axes in ([0], [1, 2, 3]) if positions.shape[0] == 4 else (list(range(positions.shape[0])),):
        local = positions[axes][:, tokens]
        span = _spans(local, number, starts.numel(), position_start)
        before = span.cumsum(0) - span
        offset = before - before[first]
        moved[torch.tensor(axes)[:, None], tokens] = local + offset[number]
    return (
        joined.reshape(host.shape).to(document_map.device),
        moved.reshape(position_ids.shape).to(position_ids),
    )


def _require_shapes(
    document_map: Tensor, position_ids: Tensor, groups: Tensor | None, membership: Tensor | None
) -> None:
    shape = document_map.shape
    fits = position_ids.ndim in (2, 3) and position_ids.shape[-2:] == shape
    if not fits or position_ids.is_floating_point():
        raise BoundaryError(
            f"`position_ids` must be integers of shape {list(shape)} or [axes, {shape[0]}, {shape[1]}], got "
            f"{position_ids.dtype} of {list(position_ids.shape)}."
        )
    for name, value in (("groups", groups), ("membership", membership)):
        if value is not None and value.shape != shape:
            raise BoundaryError(
                f"`{name}` has shape {list(value.shape)}, the document map {list(shape)}: they describe other tokens."
            )


def _group_of_documents(
    groups: Tensor | None, host: Tensor, tokens: Tensor, starts: Tensor, number: Tensor
) -> Tensor:
    """Return the group of each document `[N]`."""
    if groups is None:
        return torch.ones_like(starts)
    flat = host_map(groups).reshape(-1)[tokens]
    group = flat[starts]
    if not torch.equal(group[number], flat) or bool((group < 1).any()):
        raise BoundaryError(
            "`groups` must give all tokens of a document one number of 1 or more; somewhere a document lies in two "
            "groups or in none. Build it with `group_map`."
        )
    return group


def _first_of_group(rows: Tensor, group: Tensor) -> Tensor:
    """Return, for each document, the number of the first document of its group `[N]`."""
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (group[1:] != group[:-1])
    first = is_first.nonzero().squeeze(1)
    keys = torch.stack([rows[first], group[first]])
    if keys.unique(dim=1).shape[1] != first.numel():
        _, again, count = keys.unique(dim=1, return_inverse=True, return_counts=True)
        row, key = keys[:, int((count[again] > 1).nonzero()[0, 0])].tolist()
        raise BoundaryError(
            f"Group {key} of row {row} comes back after another group, so its documents are not neighbours; joined, "
            "they would be one document in two pieces, which offsets cannot say. Lay the documents of a group side by "
            "side, e.g. sort them by their key before packing."
        )
    return first[is_first.cumsum(0) - 1]


def _numbers_in_row(rows: Tensor, first: Tensor) -> Tensor:
    """Number the groups of each row from 1, `[N]`."""
    is_first = first == torch.arange(first.numel())
    count = is_first.cumsum(0)
    row_first = torch.searchsorted(rows, rows)
    return count - count[row_first] + 1


def _spans(local: Tensor, number: Tensor, num_documents: int, start: int) -> Tensor:
    """Return how many positions each document takes up, `[N]`."""
    flat, owner = local.reshape(-1), number.repeat(local.shape[0])
    shape = torch.zeros(num_documents, dtype=torch.int64)
    lowest = shape.scatter_reduce(0, owner, flat, "amin", include_self=False)
    largest = shape.scatter_reduce(0, owner, flat, "amax", include_self=False)
    if bool((lowest != start).any()):
        document = int((lowest != start).nonzero()[0, 0])
        raise BoundaryError(
            f"The positions of document {document} (counted over all rows) start at {int(lowest[document])}, not at "
            f"{start}: they are not local, and moving them again would leave gaps. Join documents once, before "
            "anything else moves their positions, or give `position_start`."
        )
    return largest - start + 1
