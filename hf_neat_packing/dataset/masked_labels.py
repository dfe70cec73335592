"""Labels of documents whose masks say which tokens are trained on, made when a document is read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hf_neat_packing.dataset.arrow import ListColumn
from hf_neat_packing.dataset.label_masks import IGNORED

if TYPE_CHECKING:
    import datasets


class MaskedLabels:
    """Read a column of labels, or of token ids, with -100 wherever any mask is 0.

    Args:
        column: The labels; token ids where a data set has none.
        masks: Columns of 0 and 1 with as many values, by name.

    Attributes:
        first_rows: As for `ListColumn`.
        value_type: The Arrow type of a label: the column's, or int64 where that has no sign.
    """

    def __init__(self, column: ListColumn, masks: Mapping[str, ListColumn]) -> None:
        self._column, self._masks = column, dict(masks)
        self.first_rows = column.first_rows
        unsigned = pa.types.is_unsigned_integer(column.value_type)
        self.value_type: pa.DataType = pa.int64() if unsigned else column.value_type
        self._dtype = self.value_type.to_pandas_dtype()

    def lengths(self) -> NDArray[np.int64]:
        """Return the length in tokens of each row's document, `[R]`."""
        return self._column.lengths()

    def lengths_of_masks(self) -> dict[str, NDArray[np.int64]]:
        """Return the number of values of each mask, `[R]`."""
        return {name: mask.lengths() for name, mask in self._masks.items()}

    def locate(self, rows: NDArray[np.integer[Any]]) -> list[int]:
        """Find the chunk of each row, as for `ListColumn`."""
        return self._column.locate(rows)

    def read(
        self,
        rows: NDArray[np.integer[Any]],
        chunks: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> list[NDArray[Any]]:
        """Read pieces of documents, as for `ListColumn`; these are arrays of their own."""
        labels = self._column.read(rows, chunks, starts, lengths)
        pieces = [piece.astype(self._dtype) for piece in labels]
        for mask in self._masks.values():
            bits = mask.read(rows, mask.locate(rows), starts, lengths)
            for piece, trained in zip(pieces, bits, strict=True):
                piece[trained == 0] = IGNORED
        return pieces

    def gather(
        self,
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.int64] | None,
        lengths: NDArray[np.integer[Any]],
    ) -> NDArray[Any]:
        """Lay pieces of documents end to end, as for `ListColumn`."""
        labels = self._column.gather(rows, starts, lengths).astype(self._dtype)
        for mask in self._masks.values():
            labels[mask.gather(rows, starts, lengths) == 0] = IGNORED
        return labels

    def feature(self) -> "datasets.Sequence":
        """Return the `datasets` feature of the labels."""
        from datasets import Sequence as ListFeature
        from datasets import Value

        return ListFeature(Value(str(self.value_type)))
