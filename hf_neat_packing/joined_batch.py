"""Documents of a packed row that are meant to see each other: conversations cut into turns, pages of a book."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .errors import ColumnError
from .membership import group_map, join_documents
from .offsets import full_stream_cu_seqlens
from .packed_batch import PackedBatch
from .positions import seq_idx_from_document_map


def join_packed_batch(
    packed: PackedBatch, by: str | None = None, *, position_start: int = 0
) -> PackedBatch:
    """Join the documents of each row, all of them or those with the same value in a column.

    Labels stay as they are: the first token of every document is no target, so the number of targets does
    not depend on what is joined.

    Args:
        packed: the packed batch.
        by: a per-document column such as `conversation_id`, which is taken out of the batch; None joins
            whole rows. None as a value joins nothing.
        position_start: position of a document's first token.

    Returns:
        The batch with one document for each group: map, offsets, `seq_idx` and positions follow.

    Raises:
        ColumnError: the column is not there.
        BoundaryError: documents of one group that are not neighbours.
    """
    groups = None
    per_document = packed.per_document
    if by is not None:
        if by not in per_document:
            raise ColumnError(
                f"join_documents={by!r} needs a per-document column of that name; the batch has "
                f"{sorted(per_document)}. Keep the column in the data set (with the Trainer: "
                "remove_unused_columns=False), or write join_documents=True to join whole rows."
            )
        groups = group_map(packed.document_map, _by_row(packed, per_document[by]))
        per_document = {name: values for name, values in per_document.items() if name != by}
    document_map, position_ids = join_documents(
        packed.document_map, packed.position_ids, groups=groups, position_start=position_start
    )
    cu_seqlens, max_seqlen = full_stream_cu_seqlens(document_map)
    return replace(
        packed,
        per_document=per_document,
        document_map=document_map,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        seq_idx=seq_idx_from_document_map(document_map),
    )


def _by_row(packed: PackedBatch, values: Any) -> list[Sequence[Any]]:
    keys = values.tolist() if hasattr(values, "tolist") else list(values)
    rows, done = [], 0
    for lengths in packed.lengths:
        rows.append(keys[done : done + len(lengths)])
        done += len(lengths)
    return rows
