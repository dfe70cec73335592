"""Offsets of documents, in two layouts that are never mixed.

* **full stream**: the row is flattened to `[B*S]` with its padding, so padding runs are segments too
  and the last offset is `B*S`. This is what the varlen kwargs of transformers mean.
* **unpadded**: padding is gathered away and offsets count real tokens only. This is what native
  FlashAttention-4 and recurrent kernels take; its batch-major form survives a split on dimension 0.

Legend: as in `documents`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .documents import binary_to_map, check_ids, documents, host_map, require_tokens, runs_of
from .errors import BoundaryError

INT32_MAX = 2**31 - 1


def require_int32_offsets(num_tokens: int) -> None:
    """Raise where offsets that end at `num_tokens` are past the int32 range of the kernels.

    Raises:
        BoundaryError: naming the number.
    """
    if num_tokens > INT32_MAX:
        raise BoundaryError(
            f"The row holds {num_tokens} tokens; varlen kernels take int32 offsets, at most {INT32_MAX}. "
            "Larger offsets would wrap around and mix documents. Use a smaller `max_length` or fewer rows."
        )


def int32_offsets(lengths: Tensor) -> Tensor:
    """Offsets `[N+1]` from lengths `[N]`, summed in int64 and refused past the int32 range of the kernels."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    require_int32_offsets(int(offsets[-1]))
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
    runs = runs_of(host)
    real = runs.ids != 0
    check_ids(host, runs.starts[real], runs.ids[real], what="a gap in the full stream")
    return int32_offsets(runs.lengths).to(document_map.device), int(runs.lengths.max())


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
