"""`pack_stream`: documents of any iterable in, packs as they come out."""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.dataset.packed_stream import PackedStream
from hf_neat_packing.dataset.stream_documents import DocumentCutter
from hf_neat_packing.planning import OnEmpty, OnOverlong, TruncateSide

__all__ = ["PackedStream", "pack_stream"]


def pack_stream(
    iterable: Iterable[Mapping[str, Any]],
    *,
    max_length: int,
    buffer: int = 4096,
    on_overlong: OnOverlong = "error",
    truncate_side: TruncateSide = "right",
    min_length: int = 0,
    on_empty: OnEmpty = "drop",
    columns: Mapping[str, ColumnRule | str] | None = None,
    by_tables: bool = False,
) -> PackedStream:
    """Pack any iterable of documents into rows of at most `max_length` tokens, as they come.

    Args:
        iterable: Documents as mappings from column to value: a `datasets.IterableDataset`, also
            one that `split_dataset_by_node` gave to this rank, or any other iterable.
        max_length: The most tokens in a pack.
        buffer: Documents to read ahead; more only where they do not fill one pack. 1,000 are
            enough for packs that are full to 0.1 %.
        on_overlong: What becomes of a document longer than `max_length`: `error`, `truncate`,
            `split` or `drop`.
        truncate_side: The side that `truncate` cuts, `right` or `left`.
        min_length: Documents with fewer tokens are dropped, and counted.
        on_empty: `drop` (and count) empty documents, or `error`.
        columns: Rules by column name, for names that `DEFAULT_COLUMN_RULES` does not know.
        by_tables: Read a stored `datasets.IterableDataset` (not mapped, filtered or formatted) by Arrow tables of up
            to 1,000 rows, so many more of which may be held: many times quicker than its rows. Tokens are then
            read-only arrays of the stored dtype, and only the stream knows how far the source was read.

    Returns:
        An iterable of packs: nested columns, one inner value per document, as the source gave it.

    Raises:
        PlanningError: If an option cannot be honoured.

    Example:
        >>> stream = pack_stream([{"input_ids": [1, 2]}, {"input_ids": [3]}], max_length=4)
        >>> list(stream)
        [{'input_ids': [[1, 2], [3]]}]
    """
    cutter = DocumentCutter(
        max_length,
        on_overlong=on_overlong,
        truncate_side=truncate_side,
        min_length=min_length,
        on_empty=on_empty,
        columns=columns,
    )
    return PackedStream(iterable, cutter, buffer=buffer, by_tables=by_tables)
