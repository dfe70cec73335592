"""Where the flat stream of real tokens lies in rows `[B, S]`.

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens, `R` rows of positions.
"""

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .offsets import INT32_MAX, int32_offsets


class Slots:
    """The places of real tokens in rows.

    Args:
        lengths: for each row, the tokens of its documents.
        flat: the same in one line, int64 `[N]`.
        width: tokens of a row.

    Attributes:
        shape: `(B, S)`.
        starts: first token of each document in the flat stream, int64 `[N]`.
        positions: restarting positions from 0, int64 `[T]`.
        row_documents: number of each token's document in its row, int64 `[T]`, from 1.
        cu_seqlens: offsets of the documents and, where a row has one, its tail, int32 `[segments + 1]`.
        max_seqlen: tokens of the longest of them.
    """

    def __init__(
        self, lengths: tuple[tuple[int, ...], ...], flat: NDArray[np.int64], width: int
    ) -> None:
        self.shape = (len(lengths), width)
        ends = flat.cumsum()
        self.starts = ends - flat
        self.positions = np.arange(int(ends[-1]))
        self.positions -= self.starts.repeat(flat)
        numbers = np.arange(1, len(flat) + 1)
        if len(lengths) > 1:
            per_row = np.array([len(row) for row in lengths])
            numbers -= (per_row.cumsum() - per_row).repeat(per_row)
        self.row_documents = numbers.repeat(flat)
        self._filled = [sum(row) for row in lengths]
        self._dense = all(filled == width for filled in self._filled)
        segments = flat
        if not self._dense:
            tails = [width - filled for filled in self._filled]
            with_tails = [
                [*row, tail] if tail else row for row, tail in zip(lengths, tails, strict=True)
            ]
            segments = np.fromiter(chain.from_iterable(with_tails), dtype=np.int64)
        self.cu_seqlens = _offsets(segments)
        self.max_seqlen = int(segments.max())

    def lay(self, values: NDArray[Any], pad_value: int | float | bool) -> Tensor:
        """Lay flat values `[T]` into rows `[B, S]`."""
        if self._dense:
            return torch.from_numpy(np.ascontiguousarray(values).reshape(self.shape))
        rows = np.full(self.shape, pad_value, dtype=values.dtype)
        done = 0
        for row, filled in zip(rows, self._filled, strict=True):
            row[:filled] = values[done : done + filled]
            done += filled
        return torch.from_numpy(rows)

    def seq_idx(self) -> Tensor:
        """Number the segments of each row, int32 `[B, S]`; the tail follows its last document."""
        index = self.lay(np.subtract(self.row_documents, 1, dtype=np.int32, casting="unsafe"), 0)
        if not self._dense:
            for row, filled in zip(index, self._filled, strict=True):
                row[filled:] = row[filled - 1] + 1
        return index

    def lay_positions(self, positions: NDArray[np.int64], start: int) -> Tensor:
        """Lay positions `[T]` or `[R, T]` into rows; the tail is numbered like one more document.

        Args:
            positions: of each real token.
            start: position of the tail's first token.

        Returns:
            int64 `[B, S]` or `[R, B, S]`.
        """
        if positions.ndim == 2:
            return torch.stack([self.lay_positions(axis, start) for axis in positions])
        laid = self.lay(positions, 0)
        if not self._dense:
            for row, filled in zip(laid, self._filled, strict=True):
                row[filled:] = torch.arange(start, start + self.shape[1] - filled)
        return laid


def _offsets(segments: NDArray[np.int64]) -> Tensor:
    """Do what `int32_offsets` does, quicker for the few segments of a batch."""
    offsets = np.zeros(len(segments) + 1, dtype=np.int64)
    segments.cumsum(out=offsets[1:])
    if offsets[-1] > INT32_MAX:
        return int32_offsets(torch.from_numpy(segments))  # which refuses it
    return torch.from_numpy(offsets.astype(np.int32))
