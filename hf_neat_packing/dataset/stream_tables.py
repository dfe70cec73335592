"""Documents of a `datasets.IterableDataset` that is stored as Arrow tables, read a table at a time.

Its rows, one by one, are Python lists made of every token: a hundred times the work of packing them.
"""

from collections.abc import Sequence
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
        state: What `state_dict` returned, to go on from there; None: the beginning.
    """

    def __init__(self, source: Any, buffer: int, state: Any = None) -> None:
        self._tables = source.with_format("arrow")
        self._tables.set_epoch(source.epoch)
        if state is not None:
            self._tables.load_state_dict(state)
        # Only row by row does the library divide a source among workers.
        alone = get_worker_info() is None
        self._iterator = iter(self._tables.iter(min(buffer, _ROWS)) if alone else self._tables)

    def read(self) -> Sequence[dict[str, Any]]:
        """Return the documents of the next table; none at the end."""
        for table in self._iterator:
            if table.num_rows:
                return documents_in(table)
        return []

    def state_dict(self) -> Any:
        """Return where the source stands after the tables that were read."""
        return self._tables.state_dict()


def documents_in(table: pa.Table) -> Sequence[dict[str, Any]]:
    """Return the rows of a table as documents; lists are read-only arrays that share its memory."""
    every = np.arange(table.num_rows)
    starts = [0] * table.num_rows
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            columns[name] = column.to_pylist()
            continue
        try:
            tokens = ListColumn(name, column)
        except ColumnError:
            # Something is null: as a row, the document that has it is refused by its number.
            rows: list[dict[str, Any]] = table.to_pylist()
            return rows
        lengths = tokens.lengths().tolist()
        columns[name] = tokens.read(every, tokens.locate(every), starts, lengths)
    return DocumentsByColumn(columns)
