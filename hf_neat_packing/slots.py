"""Where the flat stream of real tokens lies in rows `[B, S]`.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens, `R` rows of positions.
A segment is a document or the tail of a row: together they cover the rows.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .offsets import require_int32_offsets


class Slots:
    """The places of real tokens in rows.

    Args:
        lengths: for each row, the tokens of its documents, none of which is empty.
        width: tokens of a row.
        position_start: position of the first token of a document, and of a tail.

    Raises:
        BoundaryError: more tokens than int32 offsets can count.

    Attributes:
        shape: `(B, S)`.
        starts: first token of each document in the flat stream, int64 `[N]`.
        positions: restarting positions of the flat stream, int64 `[T]`.
        cu_seqlens: offsets of the segments, int32 `[segments + 1]`.
        max_seqlen: tokens of the longest segment.
    """

    def __init__(
        self, lengths: Sequence[Sequence[int]], width: int, *, position_start: int = 0
    ) -> None:
        require_int32_offsets(len(lengths) * width)
        self.shape = (len(lengths), width)
        self._filled = [sum(row) for row in lengths]
        tails = [width - filled for filled in self._filled]
        self._dense = not any(tails)
        segments = lengths
        if not self._dense:
            segments = [
                (*row, tail) if tail else row for row, tail in zip(lengths, tails, strict=True)
            ]
        self._sizes = _joined(segments)
        self._numbers = np.arange(len(self._sizes))  # of each segment in its row, from 0
        if len(lengths) > 1:
            per_row = np.array([len(row) for row in segments])
            self._numbers -= (per_row.cumsum() - per_row).repeat(per_row)

        offsets = np.zeros(len(self._sizes) + 1, dtype=np.int64)
        self._sizes.cumsum(out=offsets[1:])
        self.cu_seqlens = torch.from_numpy(offsets.astype(np.int32))
        self.max_seqlen = max(map(max, segments))
        places = np.arange(len(lengths) * width)
        places -= (offsets[:-1] - position_start).repeat(self._sizes)
        self._positions = places.reshape(self.shape)
        self.starts, self.positions = offsets[:-1], places
        if not self._dense:
            documents = _joined(lengths)
            self.starts = documents.cumsum() - documents
            rows = zip(self._positions, self._filled, strict=True)
            self.positions = np.concatenate([row[:filled] for row, filled in rows])

    def document_map(self) -> Tensor:
        """Number the documents of each row from 1, int64 `[B, S]`; the tail is 0."""
        rows = (self._numbers + 1).repeat(self._sizes).reshape(self.shape)
        if not self._dense:
            for row, filled in zip(rows, self._filled, strict=True):
                row[filled:] = 0
        return torch.from_numpy(rows)

    def seq_idx(self) -> Tensor:
        """Number the segments of each row from 0, int32 `[B, S]`."""
        numbers = self._numbers.astype(np.int32)
        return torch.from_numpy(numbers.repeat(self._sizes).reshape(self.shape))

    def lay(self, values: NDArray[Any], pad_value: int | float | bool) -> Tensor:
        """Lay flat values `[T]` into rows `[B, S]`."""
        if self._dense:
            return torch.from_numpy(values.reshape(self.shape))
        return self._fill(np.full(self.shape, pad_value, dtype=values.dtype), values)

    def lay_positions(self, positions: NDArray[np.int64]) -> Tensor:
        """Lay positions `[T]` or `[R, T]` into rows; the tail is numbered like one more document.

        Args:
            positions: of each real token.

        Returns:
            int64 `[B, S]` or `[R, B, S]`.
        """
        shape = (*positions.shape[:-1], *self.shape)
        if self._dense:
            return torch.from_numpy(positions.reshape(shape))
        return self._fill(np.broadcast_to(self._positions, shape).copy(), positions)

    def _fill(self, rows: NDArray[Any], values: NDArray[Any]) -> Tensor:
        """Write values `[..., T]` over the real tokens of `[..., B, S]`."""
        done = 0
        for row, filled in enumerate(self._filled):
            rows[..., row, :filled] = values[..., done : done + filled]
            done += filled
        return torch.from_numpy(rows)


def _joined(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array(list(chain.from_iterable(rows)), dtype=np.int64)
