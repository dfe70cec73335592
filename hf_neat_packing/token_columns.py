"""Token columns of documents laid end to end: one flat array a column, and the tokens of each document.

Legend: `N` documents, `T` their tokens.
"""

import struct
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .columns import ColumnRule, check_document_lengths, token_lengths
from .errors import ColumnError


def join_token_columns(
    columns: Mapping[str, list[Any]], rules: Mapping[str, ColumnRule]
) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Join the token columns, which are lists, arrays or tensors.

    Args:
        columns: the values of each column, `N` in document order.
        rules: the rule of each column.

    Returns:
        The flat values of each token column, `[T]`, int64 where they are whole numbers, in memory of their own;
        and the tokens of each document, on which all token columns agree: none where there is no token column.

    Raises:
        ColumnError: a value that is missing or not one per token, or columns that disagree on a length.
    """
    flat: dict[str, NDArray[Any]] = {}
    lengths: dict[str, list[int]] = {}
    for name, rule in rules.items():
        if rule.kind == "token":
            flat[name], lengths[name] = _join(name, columns[name])
    check_document_lengths(lengths)
    return flat, next(iter(lengths.values()), [])


def _join(name: str, values: list[Any]) -> tuple[NDArray[Any], list[int]]:
    """Join the values of a token column, and say how long each is."""
    try:
        joined, lengths = _joined(values)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        token_lengths(name, values)  # names a value that is missing
        _require_flat(name, values)
        raise
    if joined.ndim != 1:
        _require_flat(name, values)
    if joined.dtype.kind in "iub":
        joined = joined.astype(np.int64, copy=False)
    return joined, lengths


def _joined(values: list[Any]) -> tuple[NDArray[Any], list[int]]:
    """Join values of one form or of several; the lengths are right if what was joined is flat."""
    if isinstance(values[0], list):
        return _joined_lists(values), list(map(len, values))
    if isinstance(values[0], Tensor):
        try:
            joined = torch.cat(values)
        except TypeError:
            pass  # not all are tensors
        else:
            return joined.numpy(), list(map(Tensor.numel, values))  # their len() is slow
    return _joined_arrays(values), list(map(len, values))


def _joined_arrays(values: list[Any]) -> NDArray[Any]:
    """Join arrays, or what becomes one."""
    try:
        return np.concatenate(values, dtype=np.int64, casting="safe")
    except TypeError:
        return np.concatenate(values)  # fractions, or whole numbers that int64 may not hold


def _joined_lists(values: list[Any]) -> NDArray[Any]:
    """Join lists of Python numbers, among which there may be other forms."""
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, (list, tuple)) else value.tolist()
    memory = bytearray(8 * len(flat))
    try:
        # The fastest way from Python integers to memory that there is.
        struct.pack_into(f"{len(flat)}q", memory, 0, *flat)
    except struct.error:
        try:
            return np.array(array("q", flat))  # says which number does not fit
        except TypeError:
            return np.concatenate([np.asarray(value) for value in values])
    return np.frombuffer(memory, dtype=np.int64)


def _require_flat(name: str, values: list[Any]) -> None:
    """Raise for the first value that has not one dimension."""
    for number, shape in enumerate(map(np.shape, values)):
        if len(shape) != 1:
            raise ColumnError(
                f"Column {name!r} of document {number} has shape {list(shape)}; a token column has one value per "
                f"token, [tokens]. Write columns={{{name!r}: 'media'}} if it holds rows of something else."
            )
