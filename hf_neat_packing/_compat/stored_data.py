"""Where `datasets` keeps what it has no public reader for."""

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .releases import release

if TYPE_CHECKING:
    import datasets


def row_indices(dataset: "datasets.Dataset") -> NDArray[np.int64] | None:
    """Return the table row of each document, `[documents]`, or None where they are the same.

    `shuffle`, `select` and `filter` leave the table as it is and keep a list of rows beside it;
    `flatten_indices()` would copy every token (drop when there is a public reader).
    """
    indices = dataset._indices
    if indices is None:
        return None
    # Stored as uint64, which numpy would mix with int64 into floats.
    rows: NDArray[np.int64] = indices.column(0).to_numpy().view(np.int64)
    return rows


def data_fingerprint(dataset: "datasets.Dataset") -> str:
    """Return what `datasets` names its own cache files by (drop when there is a public reader)."""
    fingerprint: str = dataset._fingerprint
    return fingerprint


def streams_tables(source: Any) -> bool:
    """Whether a source is a `datasets.IterableDataset` that hands on Arrow tables as they are stored.

    Formatted, mapped and filtered ones make rows, and tables of those would be made of the rows; a state that the
    source was given counts rows. Their state between two tables is exact in the releases that are tested.

    Removal: a public way to ask (`IterableDataset` has neither `format` nor a reader of its tables).
    """
    library = sys.modules.get("datasets")
    if library is None or not isinstance(source, library.IterableDataset):
        return False
    if release(library) < (5, 2) or source.features is None:
        return False
    examples = getattr(source, "_ex_iterable", None)
    untouched = (
        getattr(source, "_formatting", True) is None
        and getattr(source, "_starting_state_dict", True) is None
    )
    return untouched and getattr(examples, "iter_arrow", None) is not None
