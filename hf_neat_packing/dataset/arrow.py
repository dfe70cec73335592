"""Read documents out of Arrow list columns by their offsets, without copying or decoding them.

A list column keeps the tokens of all its documents in one flat buffer beside an array of offsets.
Lengths are differences of offsets and a document is a slice of the buffer, so planning never
touches a token and a memory-mapped data set stays on disk until a pack is read.

Symbols: `R` rows of the table, `C` chunks of a column, `P` pieces asked for.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hf_neat_packing.errors import ColumnError

# Up to this size tokens are joined in one go; a larger array is filled with blocks that are in the cache.
_JOINED_BYTES = 2**22
_BLOCK_BYTES = 2**17


class ListColumn:
    """Hold one list column of an Arrow table as flat values and offsets.

    Args:
        name: The column's name, for messages.
        column: A column of type `list`, `large_list` or `fixed_size_list` of numbers or booleans,
            `[R]`, in any number of chunks, sliced or not.

    Attributes:
        num_rows: R.
        first_rows: The first row of each chunk that has rows.
        value_type: The Arrow type of a token.

    Raises:
        ColumnError: If the column is not such a list, or if a document or one of its values is
            null.
    """

    def __init__(self, name: str, column: pa.ChunkedArray) -> None:
        self.name = name
        check_list_type(name, column.type)
        self.value_type: pa.DataType = column.type.value_type
        self._boolean = pa.types.is_boolean(self.value_type)
        self._values: list[Any] = []
        self._offsets: list[NDArray[Any]] = []
        first_rows = [0]
        for chunk in column.chunks:
            if len(chunk):
                values, offsets = self._open_chunk(chunk, first_rows[-1])
                self._values.append(values)
                self._offsets.append(offsets)
                first_rows.append(first_rows[-1] + len(chunk))
        self.num_rows = first_rows.pop()
        self.first_rows = tuple(first_rows)
        self._chunk_starts = np.array(first_rows, dtype=np.int64)

    @cached_property
    def _begins(self) -> NDArray[Any]:
        """A few bytes per row, for one look-up per pack instead of one per document."""
        begins = [offsets[:-1] for offsets in self._offsets]
        return begins[0] if len(begins) == 1 else _join(begins)

    def _open_chunk(self, chunk: pa.Array, first_row: int) -> tuple[Any, NDArray[Any]]:
        """Return a chunk's flat values and the offsets `[rows + 1]` into them."""
        if chunk.null_count:
            row = first_row + int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
            raise _null_error(self.name, row, "has no value (null)")
        if pa.types.is_fixed_size_list(chunk.type):
            size = chunk.type.list_size
            offsets = (np.arange(len(chunk) + 1, dtype=np.int64) + chunk.offset) * size
        else:
            offsets = chunk.offsets.to_numpy()
        values = chunk.values
        if values.null_count:
            # A slice of a larger array shares the values of its neighbours, nulls included.
            low, high = int(offsets[0]), int(offsets[-1])
            values, offsets = values.slice(low, high - low), offsets - low
            if values.null_count:
                bad = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]
                row = first_row + int(np.searchsorted(offsets, bad, side="right")) - 1
                raise _null_error(self.name, row, "holds a null")
        # Booleans are bits in Arrow: they stay there and are widened when a document is read.
        return (values if self._boolean else values.to_numpy()), offsets

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a token in numpy."""
        kind: np.dtype[Any] = np.dtype(self.value_type.to_pandas_dtype())
        return kind

    def lengths(self) -> NDArray[np.int64]:
        """Return the length in tokens of each row's document, `[R]`."""
        lengths = np.empty(self.num_rows, dtype=np.int64)
        for first, offsets in zip(self.first_rows, self._offsets, strict=True):
            np.subtract(offsets[1:], offsets[:-1], out=lengths[first : first + len(offsets) - 1])
        return lengths

    def locate(self, rows: NDArray[np.integer[Any]]) -> list[int]:
        """Find the chunk of each row, `[P]`; the same for every column with these `first_rows`."""
        if len(self._values) == 1:
            return [0] * len(rows)
        chunks: list[int] = (np.searchsorted(self._chunk_starts, rows, side="right") - 1).tolist()
        return chunks

    def read(
        self,
        rows: NDArray[np.integer[Any]],
        chunks: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> list[NDArray[Any]]:
        """Slice pieces of documents out of the column.

        Args:
            rows: The table row of each piece, `[P]`.
            chunks: What `locate` gave for them, `[P]`.
            starts: The first token of each piece inside its document, `[P]`.
            lengths: The number of tokens of each piece, `[P]`.

        Returns:
            One read-only 1-D array per piece, in the stored dtype; a view of the column's buffer
            except for booleans.
        """
        values = self._values
        pieces = zip(chunks, self._begins[rows].tolist(), starts, lengths, strict=True)
        if self._boolean:
            return [
                values[c].slice(b + s, n).to_numpy(zero_copy_only=False) for c, b, s, n in pieces
            ]
        return [values[c][(first := b + s) : first + n] for c, b, s, n in pieces]

    @cached_property
    def _memory(self) -> list[memoryview]:
        """The bytes of each chunk's values; a set on disk has a hundred chunks and more."""
        return [memoryview(values.view(np.uint8)) for values in self._values]

    def gather(
        self,
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.int64] | None,
        lengths: NDArray[np.integer[Any]],
    ) -> NDArray[Any]:
        """Lay pieces of documents end to end.

        Args:
            rows: The table row of each piece, `[P]`.
            starts: The first token of each piece inside its document, `[P]`; None: all at 0.
            lengths: The number of tokens of each piece, `[P]`.

        Returns:
            The tokens, 1-D, in the stored dtype.
        """
        chunks = self.locate(rows)
        if self._boolean:
            sizes = lengths.tolist()
            first = [0] * len(sizes) if starts is None else starts.tolist()
            pieces = self.read(rows, chunks, first, sizes)
            return np.concatenate([*pieces, np.zeros(0, dtype=np.bool_)])
        begins = self._begins[rows].astype(np.int64)
        if starts is not None:
            begins += starts
        size = self.dtype.itemsize
        ends = (begins + lengths) * size
        begins *= size
        total = int(lengths.sum(dtype=np.int64)) * size
        if total <= _JOINED_BYTES:
            joined = self._join(chunks, begins.tolist(), ends.tolist())
            return np.frombuffer(joined, dtype=self.dtype)
        # Arrow's memory, which is paged in once; numpy's is given back and paged in again for every array.
        tokens = pa.allocate_buffer(total)
        memory = memoryview(tokens).cast("B")
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))) * size
        for a, b in spans(offsets, _BLOCK_BYTES):
            block = self._join(chunks[a:b], begins[a:b].tolist(), ends[a:b].tolist())
            memory[offsets[a] : offsets[b]] = block
        return np.frombuffer(tokens, dtype=self.dtype)

    def _join(self, chunks: Sequence[int], begins: list[int], ends: list[int]) -> bytes:
        """Lay bytes of chunks end to end, which is nearly twice as fast as with arrays."""
        memory = self._memory
        parts = zip(chunks, begins, ends, strict=True)
        return b"".join([memory[c][a:b] for c, a, b in parts])


def check_list_type(name: str, kind: pa.DataType) -> None:
    """Check that a column holds one flat list of numbers per document.

    Args:
        name: The column's name, for the message.
        kind: Its Arrow type.

    Raises:
        ColumnError: If it is nested deeper (already packed), or no list of numbers.
    """
    is_list = _is_list(kind)
    if is_list and _is_list(kind.value_type):
        raise ColumnError(
            f"Column {name!r} has type {kind}: lists of lists, which is what a packed set looks "
            "like. Packing packs would join documents without their boundaries. Accepted: one "
            "document per row, as a flat list of tokens. Give an already packed set to the "
            f"collator as it is, or, if {name!r} is something else, declare "
            f"columns={{{name!r}: 'document'}} or 'media'."
        )
    if not is_list or not (
        pa.types.is_integer(kind.value_type)
        or pa.types.is_floating(kind.value_type)
        or pa.types.is_boolean(kind.value_type)
    ):
        raise ColumnError(
            f"Column {name!r} has type {kind}, but a token column holds one number per token. "
            "Accepted: a list of integers, floats or booleans as long as the document. Tokenize "
            f"first, or declare columns={{{name!r}: 'document'}} or 'ignore'."
        )


def _join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Lay arrays end to end; none at all is an empty one."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _is_list(kind: pa.DataType) -> bool:
    """Tell whether a type is one of the list types whose offsets are contiguous."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _null_error(name: str, row: int, found: str) -> ColumnError:
    """Return the error for a null in a token column."""
    return ColumnError(
        f"Column {name!r} of row {row} {found}. There is no token to put in its place, and "
        "skipping it would shift the columns against each other. Accepted: a number for every "
        f"token. Filter the row out, or write columns={{{name!r}: 'ignore'}}."
    )


def spans(offsets: NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """Cut a row of things into spans; each ends with the first thing that reaches its share.

    Args:
        offsets: Where each thing begins, and the last one ends, `[things + 1]`.
        size: What a span holds, in the unit of the offsets.

    Returns:
        The first thing of each span, and the one after its last.
    """
    marks = np.arange(size, int(offsets[-1]), size)
    bounds = np.unique([0, *np.searchsorted(offsets, marks).tolist(), len(offsets) - 1])
    return list(pairwise(bounds.tolist()))


def nest(values: pa.Array, inner: NDArray[np.int64], outer: NDArray[np.int64]) -> pa.ListArray:
    """Lay two levels of list offsets over flat values: packs of documents of tokens.

    Args:
        values: Flat values, `[tokens]`.
        inner: Offsets of the documents into the values, `[documents + 1]`.
        outer: Offsets of the packs into the documents, `[packs + 1]`.

    Returns:
        An array of lists of lists, `[packs]`, that shares the values.

    Raises:
        OverflowError: If the values pass the 32-bit offsets of one Arrow chunk.
    """
    limit = np.iinfo(np.int32).max
    if int(inner[-1]) > limit or int(outer[-1]) > limit:
        raise OverflowError(
            f"{int(inner[-1])} tokens do not fit the int32 offsets of one Arrow chunk ({limit})."
        )
    documents = pa.ListArray.from_arrays(pa.array(inner.astype(np.int32)), values)
    return pa.ListArray.from_arrays(pa.array(outer.astype(np.int32)), documents)
