"""The documents of one packed forward, computed once and read by every layer.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens, `H` query heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...contract import DOCUMENT_MAP_KEY, VARLEN_KEYS
from ...documents import binary_to_map, documents, host_map
from ...errors import BoundaryError, ContractError
from ...offsets import (
    document_map_from_cu_seqlens,
    full_stream_cu_seqlens,
    int32_offsets,
)
from ..metadata import is_indexed_packed_mask


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Which tokens of `[B, S]` rows are documents.

    Attributes:
        shape: `(B, S)`.
        tokens: int64 `[T]` on the host, the real tokens as indices into the flattened rows.
        lengths: document lengths in tokens, in order.
    """

    shape: tuple[int, int]
    tokens: Tensor
    lengths: tuple[int, ...]
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @cached_property
    def is_full(self) -> bool:
        """Whether no token is padding."""
        return self.tokens.numel() == self.shape[0] * self.shape[1]

    @cached_property
    def stretch(self) -> tuple[int, int] | None:
        """Start and stop of the real tokens where they lie in one piece, else None."""
        if self.tokens.numel() == 0:
            return None
        first, last = int(self.tokens[0]), int(self.tokens[-1])
        return (first, last + 1) if last - first + 1 == self.tokens.numel() else None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token indices int64 `[T]` and `cu_seqlens` int32 `[N+1]` on a device."""
        if device not in self._on_device:
            offsets = int32_offsets(torch.tensor(self.lengths, dtype=torch.int64))
            self._on_device[device] = (self.tokens.to(device), offsets.to(device))
        return self._on_device[device]

    def block(self, start: int, stop: int) -> tuple[int, slice | Tensor]:
        """Return the row and the positions in it of the real tokens `start:stop` of one document."""
        row, first = divmod(int(self.tokens[start]), self.shape[1])
        if int(self.tokens[stop - 1]) - int(self.tokens[start]) == stop - 1 - start:
            return row, slice(first, first + stop - start)
        return row, self.tokens[start:stop] - row * self.shape[1]


def packed_rows(document_map: Tensor) -> PackedRows:
    """Read a document map; costs one device synchronisation.

    Args:
        document_map: integer `[B, S]`, or `[S]` for one row; 0 is padding, wherever it lies.

    Raises:
        BoundaryError: not a map, a negative id, or an id that comes back after another document.
    """
    if document_map.ndim == 1:
        document_map = document_map[None]
    host = host_map(binary_to_map(document_map))
    tokens, starts, _ = documents(host)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    shape = (host.shape[0], host.shape[1])
    return PackedRows(shape, tokens, tuple(lengths.tolist()) if tokens.numel() else ())


def document_map_of_inputs(inputs: Mapping[str, Any]) -> Tensor | None:
    """Find the document map in the inputs of a forward.

    Args:
        inputs: what the forward was called with, by name. Read are `_packed_seq_ids`, the four varlen
            kwargs, and an integer 2-D `attention_mask` with document numbers in it.

    Returns:
        `[B, S]`, or None where the inputs hold no boundaries. Padding that only varlen kwargs describe is a
        document like the others.

    Raises:
        ContractError: some of the varlen kwargs without the others, or no tokens to read a shape from.
        BoundaryError: sources that disagree, or offsets that do not cover the rows.
    """
    mask: Any = inputs.get("attention_mask")
    document_map: Tensor | None = inputs.get(DOCUMENT_MAP_KEY)
    if is_indexed_packed_mask(mask):
        if document_map is not None and not torch.equal(mask.to(document_map), document_map):
            raise BoundaryError(
                f"`attention_mask` numbers documents and `{DOCUMENT_MAP_KEY}` numbers them differently: one of the "
                f"two belongs to other rows. Leave `attention_mask` out; `{DOCUMENT_MAP_KEY}` marks padding with 0."
            )
        document_map = mask
    present = [name for name in VARLEN_KEYS if inputs.get(name) is not None]
    if not present:
        return document_map
    if len(present) < len(VARLEN_KEYS):
        raise ContractError(
            f"Only {present} of the varlen kwargs {list(VARLEN_KEYS)} came: boundaries that are half there cannot be "
            f"followed. Pass all four, or `{DOCUMENT_MAP_KEY}`."
        )
    offsets = inputs[VARLEN_KEYS[0]]
    if document_map is None:
        rows, length = _token_shape(inputs)
        return document_map_from_cu_seqlens(offsets, batch_size=rows, row_length=length)
    expected, _ = full_stream_cu_seqlens(document_map)
    if not torch.equal(expected.cpu(), offsets.to(torch.int32).cpu()):
        raise BoundaryError(
            f"`{DOCUMENT_MAP_KEY}` and `{VARLEN_KEYS[0]}` disagree: the map has the offsets "
            f"{expected.tolist()[:16]}, the kwargs say {offsets.tolist()[:16]}. Offsets go stale when a batch is split "
            f"or padded after collation: send `{DOCUMENT_MAP_KEY}` alone."
        )
    return document_map


def _token_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("input_ids", "inputs_embeds", "hidden_states", "position_ids"):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[0], value.shape[1]
    first = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
    if first is not None and first.ndim >= 2:
        return first.shape[0], first.shape[1]
    raise ContractError(
        f"The varlen kwargs came without `input_ids` or `inputs_embeds`, so the shape of the rows that they describe "
        f"is unknown. Pass `{DOCUMENT_MAP_KEY}` [batch, sequence]."
    )
