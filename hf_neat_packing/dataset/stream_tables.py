"""Documents of a `datasets.IterableDataset` that is stored as Arrow tables, read a table at a time.

Its rows, one by one, are Python lists made of every token: a hundred times the work of packing them.
"""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import get_worker_info

from hf_neat_packing.dataset.arrow import ListColumn
from hf_neat_packing.dataset.stream_rows import DocumentsByColumn
from hf_neat_packing.errors import ColumnError

# Rows of a table: more are no quicker.
_ROWS = 1000


def are_plain(schema: pa.Schema) -> bool:
    """Whether all columns hold numbers, text or lists of numbers, which nothing decodes."""
    return all(map(_is_plain, schema.types))


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(number or pa.types.is_boolean(kind))


class StreamTables:
    """Read a source by tables, from its beginning or from a state on.

    Args:
        source: A `datasets.IterableDataset` of tables (`streams_tables`).
        buffer: Documents that its reader holds; a table has no more.
        tokens: Names of the token columns, whose values become arrays.
        state: What `state_dict` returned, to go on from there; None: the beginning.
    """

    def __init__(
        self, source: Any, buffer: int, tokens: Collection[str], state: Any = None
    ) -> None:
        self._tables = source.with_format("arrow")
        self._tables.set_epoch(source.epoch)
        if state is not None:
            self._tables.load_state_dict(state)
        self._tokens = tokens
        # Only row by row does the library divide a source among workers.
        self._alone = get_worker_info() is None
        tables = self._tables.iter(min(buffer, _ROWS)) if self._alone else self._tables
        self._iterator = iter(tables)

    def read(self, count: int) -> Sequence[dict[str, Any]]:
        """Return the documents of the next table, in a worker of the next `count` rows; none at the end."""
        while parts := list(islice(self._iterator, 1 if self._alone else min(count, _ROWS))):
            table = parts[0] if self._alone else pa.concat_tables(parts).combine_chunks()
            if table.num_rows:
                return documents_in(table, self._tokens)
        return []

    def state_dict(self) -> Any:
        """Return where the source stands after the tables that were read."""
        return self._tables.state_dict()


def documents_in(table: pa.Table, tokens: Collection[str]) -> DocumentsByColumn:
    """Return the rows of a table as documents; tokens are read-only arrays that share its memory."""
    every = np.arange(table.num_rows)
    starts = [0] * table.num_rows
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        try:
            listed = ListColumn(name, column) if name in tokens else None
        except ColumnError:
            listed = None  # a null, refused by the number of its document; or one value for each
        if listed is None:
            columns[name] = column.to_pylist()
        else:
            lengths = listed.lengths().tolist()
            columns[name] = listed.read(every, listed.locate(every), starts, lengths)
    return DocumentsByColumn(columns)
