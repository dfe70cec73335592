"""How a stream keeps documents: by column as tables bring them, as rows while they wait, and in a state.

A row holds the values of the columns that are not ignored, in the order of `DocumentCutter.columns`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Row = tuple[Any, ...]


class DocumentsByColumn(Sequence[dict[str, Any]]):
    """Documents that are kept column by column, which are read without making each of them.

    Args:
        columns: From name to the values of all documents, in their order.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns
        self._count = len(next(iter(columns.values())))

    def __len__(self) -> int:
        """Documents."""
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Make one document."""
        return {name: values[index] for name, values in self.columns.items()}


def own(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row that keeps no table in memory: arrays that share another's are copied."""
    return tuple(
        value.copy() if isinstance(value, np.ndarray) and value.base is not None else value
        for value in row
    )


def encode_row(row: Row) -> list[Any]:
    """Write a row as values that compare and pickle plainly: arrays become bytes."""
    return [_encode(value) for value in row]


def decode_row(values: Sequence[Any]) -> Row:
    """Read what `encode_row` wrote."""
    return tuple(_decode(value) for value in values)


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("torch", *_encode(value.numpy())[1:])
    if isinstance(value, np.ndarray) and value.dtype != object:
        return ("numpy", value.dtype.str, value.shape, value.tobytes())
    return ("as it is", value)


def _decode(value: Any) -> Any:
    kind, *content = value
    if kind == "as it is":
        return content[0]
    dtype, shape, data = content
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return torch.from_numpy(array) if kind == "torch" else array
