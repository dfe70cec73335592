"""Read packs that another tool stored flat: one list of tokens a row, boundaries in a column beside.

Flat rows lose their boundaries as soon as a tool cuts a row or drops the column beside it. Here
they are read once, every source of boundaries is checked against the others, and the result is
nested, so that boundaries cannot be lost again.

Symbols: `R` rows (packs), `D` documents, `T` tokens of one record batch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hf_neat_packing._compat import row_indices
from hf_neat_packing.columns import ColumnRule, check_document_lengths, resolve_column_rules
from hf_neat_packing.dataset.arrow import ListColumn, nest
from hf_neat_packing.errors import BoundaryError, ColumnError

if TYPE_CHECKING:
    import datasets

Int64Array = NDArray[np.int64]


class _Layout(NamedTuple):
    """Boundaries of one record batch: documents in tokens `[D + 1]`, packs in documents `[R + 1]`."""

    inner: Int64Array
    outer: Int64Array


def nest_rows(
    dataset: "datasets.Dataset", columns: Mapping[str, ColumnRule | str] | None
) -> "datasets.Dataset":
    """Do what `hf_neat_packing.nest_flat_packs` says."""
    import datasets

    from hf_neat_packing.dataset.materialize import nested_features

    source = dataset if row_indices(dataset) is None else dataset.flatten_indices()
    names = [n for n in source.column_names if n not in ("seq_lengths", "position_ids")]
    rules = resolve_column_rules(names, columns)
    _check_columns(source, rules)
    kept = {name: rule for name, rule in rules.items() if rule.kind == "token"}
    features = nested_features(source.features, kept)
    batches = []
    first_row = 0
    for batch in source.data.table.to_batches():
        batches.append(_nest_batch(batch, list(kept), features.arrow_schema, first_row))
        first_row += batch.num_rows
    table = pa.Table.from_batches(batches, schema=features.arrow_schema)
    return datasets.Dataset(
        datasets.table.InMemoryTable(table),
        info=datasets.DatasetInfo(features=features),
        split=source.split,
    )


def _check_columns(dataset: "datasets.Dataset", rules: Mapping[str, ColumnRule]) -> None:
    """Check that there are boundaries, and that every column is one value per token, none null."""
    if "input_ids" not in rules or not {"seq_lengths", "position_ids"} & set(dataset.column_names):
        raise ColumnError(
            f"The columns {dataset.column_names} do not say where documents begin. Accepted: "
            "input_ids beside seq_lengths, or beside position_ids that restart at 0. Without "
            "boundaries every row is one document: write pack_dataset(dataset, max_length=...)."
        )
    odd = [name for name, rule in rules.items() if rule.kind in ("document", "media")]
    if odd:
        raise ColumnError(
            f"The columns {odd} are not one value per token, and a flat pack does not say which "
            "document each value belongs to. Accepted: token columns. Pack the documents again "
            f"with pack_dataset, or write columns={{{odd[0]!r}: 'ignore'}}."
        )
    table = dataset.data.table
    lengths = {
        name: ListColumn(name, table.column(name)).lengths()
        for name in dataset.column_names
        if name == "position_ids" or (name in rules and rules[name].kind == "token")
    }
    check_document_lengths({"input_ids": lengths.pop("input_ids"), **lengths})
    if "seq_lengths" in dataset.column_names:
        ListColumn("seq_lengths", table.column("seq_lengths"))


def _nest_batch(
    batch: pa.RecordBatch, names: list[str], schema: pa.Schema, first_row: int
) -> pa.RecordBatch:
    """Lay boundaries over the flat columns of one record batch."""
    rows = _offsets(batch.column("input_ids"))
    columns = set(batch.schema.names)
    positions = _flat(batch, "position_ids") if "position_ids" in columns else None
    if "seq_lengths" in columns:
        layout = _from_lengths(batch, rows, first_row)
        if positions is not None:
            _check_positions(positions, layout, rows, first_row, "seq_lengths")
    else:
        assert positions is not None
        starts = np.unique(np.concatenate((np.flatnonzero(positions == 0), rows[:-1])))
        starts = starts[starts < rows[-1]]
        inner = np.append(starts, rows[-1])
        layout = _Layout(inner, np.searchsorted(inner, rows))
        _check_positions(positions, layout, rows, first_row, "a restart at 0 in each document")
    if "attention_mask" in columns:
        _refuse_padding(_flat(batch, "attention_mask"), rows, first_row)
    nested = [
        nest(batch.column(name).flatten(), layout.inner, layout.outer).cast(schema.field(name).type)
        for name in names
    ]
    return pa.RecordBatch.from_arrays(nested, schema=schema)


def _offsets(column: pa.Array) -> Int64Array:
    """Return the row offsets of a list column into its flattened values, `[R + 1]`, from 0."""
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _flat(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    """Return the values of a list column end to end, `[T]`."""
    values: NDArray[Any] = batch.column(name).flatten().to_numpy(zero_copy_only=False)
    return values


def _from_lengths(batch: pa.RecordBatch, rows: Int64Array, first_row: int) -> _Layout:
    """Read boundaries from `seq_lengths`, and check that each row's add up to its tokens."""
    lengths = _flat(batch, "seq_lengths")
    outer = _offsets(batch.column("seq_lengths"))
    inner = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    sums, tokens = np.diff(inner[outer]), np.diff(rows)
    wrong = np.flatnonzero(sums != tokens)
    if len(wrong):
        row = int(wrong[0])
        raise BoundaryError(
            f"Row {first_row + row}: seq_lengths add up to {int(sums[row])}, and input_ids has "
            f"{int(tokens[row])} tokens. The lengths are stale (the row was cut or padded after "
            "packing), so documents cannot be told apart. Accepted: lengths that add up to the "
            "row. Pack again from the documents with pack_dataset."
        )
    if (lengths < 1).any():
        row = int(np.searchsorted(outer, int(np.argmax(lengths < 1)), side="right")) - 1
        raise BoundaryError(
            f"Row {first_row + row}: seq_lengths holds {int(lengths.min())}; a document in a pack "
            "has at least one token. Accepted: positive lengths that add up to the row."
        )
    return _Layout(inner, outer)


def _check_positions(
    positions: NDArray[Any], layout: _Layout, rows: Int64Array, first_row: int, source: str
) -> None:
    """Check that positions count from 0 inside each document."""
    inner = layout.inner
    expected = np.arange(inner[-1]) - np.repeat(inner[:-1], np.diff(inner))
    wrong = np.flatnonzero(positions != expected)
    if len(wrong):
        token = int(wrong[0])
        row = int(np.searchsorted(rows, token, side="right")) - 1
        raise BoundaryError(
            f"Row {first_row + row}, token {token - int(rows[row])}: position_ids is "
            f"{int(positions[token])}, and by {source} it would be {int(expected[token])}. Two "
            "readings of the boundaries would give two different packs. Accepted: positions that "
            "count 0, 1, 2, ... in each document. Remove the column that is wrong, or pack again "
            "from the documents with pack_dataset."
        )


def _refuse_padding(mask: NDArray[Any], rows: Int64Array, first_row: int) -> None:
    """Raise if a row holds padding, which would be read as a document."""
    padded = np.flatnonzero(mask == 0)
    if len(padded):
        row = int(np.searchsorted(rows, int(padded[0]), side="right")) - 1
        raise BoundaryError(
            f"Row {first_row + row}: attention_mask has zeros, so the row is padded, and padding "
            "would be read as a document. Accepted: rows of real tokens only; the collator pads. "
            "Pack again from the documents with pack_dataset."
        )
