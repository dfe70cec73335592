"""The document map and its other forms: lengths, offsets, positions, `seq_idx`, unpad data.

A *document map* is an integer tensor `[B, S]`: the 1-based number of the document that owns each
token, restarting in every row; 0 marks padding. Two offset layouts follow from it and are never mixed:

* **full stream**: the row is flattened to `[B*S]` with its padding, so padding runs are segments too
  and the last offset is `B*S`. This is what the varlen kwargs of transformers mean.
* **unpadded**: padding is gathered away and offsets count real tokens only. This is what native
  FlashAttention-4 and recurrent kernels take; its batch-major form survives a split on dimension 0.

Everything here is pure. A map on an accelerator is copied to the host once (one synchronisation per
call) and the result goes back to the map's device.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BoundaryError

INT32_MAX = 2**31 - 1


class _Runs(NamedTuple):
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


def _runs(host: Tensor) -> _Runs:
    """Find maximal runs of one id, padding included; a row start always begins a run."""
    flat = host.reshape(-1)
    if flat.numel() == 0:
        empty = flat.new_empty(0)
        return _Runs(host, empty, empty, empty)
    is_start = torch.ones_like(host, dtype=torch.bool)
    is_start[:, 1:] = host[:, 1:] != host[:, :-1]
    starts = is_start.reshape(-1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([flat.numel()]))
    return _Runs(host, starts, lengths, flat[starts])


def _check_ids(host: Tensor, starts: Tensor, ids: Tensor, *, what: str) -> None:
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
    _check_ids(host, tokens[starts], ids[starts], what="another document")
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


def int32_offsets(lengths: Tensor) -> Tensor:
    """Offsets `[N+1]` from lengths `[N]`, summed in int64 and refused past the int32 range of the kernels."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    total = int(offsets[-1])
    if total > INT32_MAX:
        raise BoundaryError(
            f"The row holds {total} tokens; varlen kernels take int32 offsets, at most {INT32_MAX}. "
            "Larger offsets would wrap around and mix documents. Use a smaller `max_length` or fewer rows."
        )
    return offsets.to(torch.int32)


def lengths_to_cu_seqlens(lengths: Sequence[int] | Tensor) -> tuple[Tensor, int]:
    """Turn document lengths into offsets.

    Args:
        lengths: tokens of each document, `[N]`. Empty documents (0) leave no trace.

    Returns:
        `cu_seqlens` int32 `[N+1]`, strictly increasing from 0, and `max_seqlen`.

    Raises:
        BoundaryError: a negative length, no token at all, or more than 2**31 - 1 tokens.

    Example:
        >>> lengths_to_cu_seqlens([3, 0, 4])
        (tensor([0, 3, 7], dtype=torch.int32), 4)
    """
    tensor = torch.as_tensor(lengths, dtype=torch.int64).reshape(-1)
    if tensor.numel() and int(tensor.min()) < 0:
        raise BoundaryError(f"Document lengths must be 0 or more tokens, got {int(tensor.min())}.")
    tensor = tensor[tensor > 0]
    if tensor.numel() == 0:
        raise BoundaryError("No document has a token; a row needs at least one document.")
    return int32_offsets(tensor), int(tensor.max())


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


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Describe the real tokens of a batch in the unpadded layout.

    Args:
        attention_mask: document map `[B, S]`; a bool or 0/1 mask is one document per non-empty row.

    Returns:
        `indices` int64 `[T]` into the flattened `[B*S]`, ascending; `cu_seqlens` int32 `[N+1]`;
        `max_seqlen`.

    Raises:
        BoundaryError: not of rank two, no real token, a negative id, or an id that comes back.

    Example:
        >>> get_unpad_data(torch.tensor([[1, 1, 0], [1, 2, 2]]))
        (tensor([0, 1, 3, 4, 5]), tensor([0, 2, 3, 5], dtype=torch.int32), 2)
    """
    host = host_map(binary_to_map(attention_mask))
    require_tokens(host)
    tokens, starts, _ = documents(host)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    device = attention_mask.device
    return tokens.to(device), int32_offsets(lengths).to(device), int(lengths.max())


def full_stream_cu_seqlens(document_map: Tensor) -> tuple[Tensor, int]:
    """Describe a batch in the full-stream layout: the offsets of transformers' varlen kwargs.

    A segment is a run of one id inside one row; a run of padding is a segment too, so the
    last offset is `B*S` and every row start is an offset.

    Args:
        document_map: `[B, S]`.

    Returns:
        `cu_seqlens` int32 `[segments+1]` on the map's device, and the longest segment in tokens
        (a long padding run counts, because a kernel must cover it).

    Raises:
        BoundaryError: not a map, no token, a negative id, or a document in two pieces.

    Example:
        >>> full_stream_cu_seqlens(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        (tensor([ 0,  2,  5,  6,  7,  9, 12], dtype=torch.int32), 3)
    """
    host = host_map(binary_to_map(document_map))
    require_tokens(host)
    runs = _runs(host)
    real = runs.ids != 0
    _check_ids(host, runs.starts[real], runs.ids[real], what="a gap in the full stream")
    return int32_offsets(runs.lengths).to(document_map.device), int(runs.lengths.max())


def position_ids_from_document_map(document_map: Tensor, *, start: int = 0) -> Tensor:
    """Number the tokens of each document from `start`; padding gets `start` counted from its own run.

    Args:
        document_map: `[B, S]`.
        start: position of a document's first token (RoBERTa-like models: `padding_idx + 1`).

    Returns:
        int64 `[B, S]` on the map's device. A document interrupted by padding goes on counting after it.

    Example:
        >>> position_ids_from_document_map(torch.tensor([[1, 1, 2, 2, 2, 0]]), start=2)
        tensor([[2, 3, 2, 3, 4, 2]])
    """
    host = host_map(binary_to_map(document_map))
    runs = _runs(host)
    positions = torch.arange(host.numel()) - torch.repeat_interleave(runs.starts, runs.lengths)
    tokens, starts, _ = documents(host)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    positions[tokens] = torch.arange(tokens.numel()) - torch.repeat_interleave(starts, lengths)
    return (positions.reshape(host.shape) + start).to(document_map.device)


def seq_idx_from_document_map(document_map: Tensor) -> Tensor:
    """Number the segments of each row from 0, padding runs included, as causal-conv1d and mamba read it.

    Returns:
        int32 `[B, S]`; two neighbours are equal exactly when they are in one segment of one row.

    Example:
        >>> seq_idx_from_document_map(torch.tensor([[1, 1, 2, 0]]))
        tensor([[0, 0, 1, 2]], dtype=torch.int32)
    """
    host = host_map(binary_to_map(document_map))
    change = torch.zeros_like(host)
    change[:, 1:] = host[:, 1:] != host[:, :-1]
    return change.cumsum(-1).to(torch.int32).to(document_map.device)


def document_map_from_cu_seqlens(cu_seqlens: Tensor, *, batch_size: int, row_length: int) -> Tensor:
    """Turn full-stream offsets back into a document map; padding segments become documents.

    Args:
        cu_seqlens: `[segments+1]`, from 0 to `batch_size * row_length`, holding every row start.
        batch_size: rows.
        row_length: tokens of a row.

    Returns:
        int64 `[B, S]`, 1-based in each row.

    Raises:
        BoundaryError: offsets that do not start at 0, do not increase, do not cover the rows
            exactly, or let a segment cross from one row into the next.
    """
    host = cu_seqlens.detach().to("cpu", torch.int64)
    check_cu_seqlens(host, num_tokens=batch_size * row_length)
    is_start = torch.zeros(batch_size * row_length, dtype=torch.int64)
    is_start[host[:-1]] = 1
    is_start = is_start.reshape(batch_size, row_length)
    if not bool(is_start[:, 0].all()):
        row = int((is_start[:, 0] == 0).nonzero()[0, 0])
        raise BoundaryError(
            f"No offset stands at {row * row_length}, the start of row {row}, in {_show(host)}: a segment would "
            "join the end of one row to the start of the next. Every row start must be an offset."
        )
    return is_start.cumsum(-1).to(cu_seqlens.device)


def check_cu_seqlens(cu_seqlens: Tensor, *, num_tokens: int, name: str = "cu_seqlens") -> None:
    """Raise unless host offsets are 1-D, start at 0, increase strictly and end at `num_tokens`.

    Args:
        cu_seqlens: integer `[segments+1]` on the host.
        num_tokens: tokens that the attention call really holds.
        name: what to call the offsets in the message.

    Raises:
        BoundaryError: naming the numbers.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise BoundaryError(
            f"`{name}` must be a 1-D integer tensor of at least two offsets [0, ..., {num_tokens}], "
            f"got shape {list(cu_seqlens.shape)} and {cu_seqlens.dtype}."
        )
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise BoundaryError(
            f"`{name}` starts at {first}, not at 0: {_show(cu_seqlens)}. The tokens before the first offset would "
            "belong to no document. After a batch was split, rebuild the offsets of each part from "
            "its document map."
        )
    if not bool((torch.diff(cu_seqlens) > 0).all()):
        raise BoundaryError(
            f"`{name}` must increase strictly, got {_show(cu_seqlens)}. A repeated or falling offset is an empty or "
            "backward document, which some kernels crash on and others read past. Leave empty documents out."
        )
    if last != num_tokens:
        raise BoundaryError(
            f"`{name}` ends at {last} but the call holds {num_tokens} tokens. "
            + (
                "Offsets past the end would read outside the row."
                if last > num_tokens
                else "The tokens after the last offset would belong to no document."
            )
            + " The offsets must cover the row exactly, padding included: close it with a segment of its own."
        )


def pad_offsets(cu_seqlens: Tensor, num_documents: int) -> Tensor:
    """Give offsets a fixed size, as captured and compiled graphs want it, by repeating the last one.

    The documents so added hold no token, and every kernel passes over them.

    Args:
        cu_seqlens: `[N+1]`.
        num_documents: documents, padding runs included, that the offsets have room for.

    Returns:
        `[num_documents+1]`.

    Raises:
        BoundaryError: more documents than there is room for.

    Example:
        >>> pad_offsets(torch.tensor([0, 3, 7]), 4)
        tensor([0, 3, 7, 7, 7])
    """
    missing = num_documents + 1 - cu_seqlens.numel()
    if missing < 0:
        raise BoundaryError(
            f"The batch holds {cu_seqlens.numel() - 1} documents (padding counts as one), but its offsets were to have "
            f"room for {num_documents}. Leaving some out would join documents. Raise the number."
        )
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def without_padded_offsets(cu_seqlens: Tensor) -> Tensor:
    """Take the repetitions of the last offset away again; other offsets are left as they are."""
    return cu_seqlens[: int((cu_seqlens != cu_seqlens[-1]).sum()) + 1]


def _show(offsets: Tensor) -> str:
    values = offsets.tolist()
    return (
        str(values)
        if len(values) <= 16
        else f"[{', '.join(map(str, values[:12]))}, ..., {values[-1]}]"
    )


def document_map_from_position_ids(position_ids: Tensor, *, batch_size: int = 1) -> Tensor:
    """Guess a document map from restarting positions, the last resort where nothing better is given.

    One- and two-dimensional ids, and the text row of four-row multi-axis ids, start a document
    wherever a position does not go up. Three-row ids (temporal, height, width) repeat inside an
    image, so there a document starts only where every axis is at its own first value.

    Args:
        position_ids: `[S]`, `[B, S]`, `[3, B, S]` or `[4, B, S]`.
        batch_size: rows of the batch; 1-D ids are only unambiguous for one row.

    Returns:
        int64 `[B, S]`; no entry is 0, because positions do not tell padding from documents.

    Raises:
        BoundaryError: 1-D ids beside several rows, or another shape.

    Example:
        >>> document_map_from_position_ids(torch.tensor([[3, 4, 5, 0, 1]]))
        tensor([[1, 1, 1, 2, 2]])
    """
    ids = position_ids
    if ids.ndim == 1:
        if batch_size != 1:
            raise BoundaryError(
                f"`position_ids` of shape {list(ids.shape)} beside a batch of {batch_size} rows: one line of "
                "positions cannot say where each row's documents start. Give `position_ids` of shape [batch, sequence]."
            )
        ids = ids[None]
    if ids.ndim == 3 and ids.shape[0] == 4:
        ids = ids[0]
    if ids.ndim == 3 and ids.shape[0] == 3:
        first = ids.amin(dim=-1, keepdim=True)
        start = (ids == first).all(0)
        # The first value of every axis also recurs in a one-patch image; only a step down or a
        # repeat of a whole coordinate is a new document there.
        start[:, 1:] &= (ids[:, :, 1:] <= ids[:, :, :-1]).all(0)
    elif ids.ndim == 2:
        start = torch.ones_like(ids, dtype=torch.bool)
        start[:, 1:] = ids[:, 1:] <= ids[:, :-1]
    else:
        raise BoundaryError(
            f"`position_ids` must be [S], [B, S], [3, B, S] or [4, B, S], got {list(position_ids.shape)}."
        )
    start[:, 0] = True
    return start.to(torch.int64).cumsum(-1)
