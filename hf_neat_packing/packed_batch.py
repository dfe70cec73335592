"""Documents laid end to end into rows: the packed batch, before any model has a say in it.

Legend: `B` rows, `S` tokens in a row, `N` documents of the batch, `R` rows of positions.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .columns import LABEL_MASKS, ColumnRule, columns_of, describe_columns
from .errors import ColumnError
from .features import Document
from .loss_labels import IGNORE_INDEX
from .multimodal.layout import MediaLayout
from .multimodal.media import TOKEN_TYPES, fill_absent, join_media
from .slots import Slots
from .token_columns import join_token_columns

# Per-token columns that have done their work before the model.
_SPENT = (*LABEL_MASKS, "attention_mask", "special_tokens_mask")

_NO_MODEL = MediaLayout()

_NO_TOKEN = (
    "Every document of the batch is empty (no token): there is nothing to train on, and no boundary to keep. Filter "
    "empty documents out of the data set."
)


@dataclass(frozen=True)
class PackedBatch:
    """Documents in rows.

    Attributes:
        tokens: per-token columns, `[B, S]`; `input_ids`, and `labels` where there are any.
        per_document: per-document columns, `[N]` in document order, or lists of what is no number.
        media: media columns, joined on dimension 0 in document order.
        document_map: int64 `[B, S]`, 1-based in each row, 0 in the tail.
        position_ids: int64 `[B, S]` or `[R, B, S]`, restarting in each document and in the tail.
        cu_seqlens: int32 `[segments + 1]`, offsets of the full stream: every document, and the
            tail of every row as one segment.
        max_seqlen: tokens of the longest segment.
        seq_idx: int32 `[B, S]`, number of each token's segment in its row, from 0.
        lengths: for each row, the tokens of its documents.
        num_empty: documents without a token, which were left out.
    """

    tokens: dict[str, Tensor]
    per_document: dict[str, Any]
    media: dict[str, Any]
    document_map: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    seq_idx: Tensor
    lengths: tuple[tuple[int, ...], ...]
    num_empty: int


def pack_rows(
    documents: list[Document],
    per_row: Sequence[int],
    *,
    columns: Mapping[str, ColumnRule | str] | None = None,
    row_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    pad_token_id: int = 0,
    position_ids_start: int = 0,
    first_label: int | None = IGNORE_INDEX,
    make_labels: bool = True,
    media: MediaLayout = _NO_MODEL,
    keep: Sequence[str] = (),
) -> PackedBatch:
    """Lay documents end to end into rows of one length.

    Args:
        documents: the documents of all rows, in order. Token columns are lists, arrays or tensors.
        per_row: how many of them lie in each row.
        columns: rules for columns beyond the usual ones.
        row_length: tokens of a row; default: the longest row.
        pad_to_multiple_of: round the row length up to a multiple of this.
        pad_token_id: token id of the tail.
        position_ids_start: position of a document's first token.
        first_label: label of each document's first token, which no token before it may predict;
            None keeps the labels as they are.
        make_labels: take labels from `input_ids` where there is no `labels` column.
        media: how the model numbers documents with images or video.
        keep: per-token columns that are laid into rows too, though models do not read them.

    Raises:
        ColumnError: a column without a rule, columns that disagree on a length, a row that does
            not fit into `row_length`, or a document that was cut inside an image.
    """
    if not documents:
        raise ColumnError(_NO_TOKEN)
    values = columns_of(documents)
    if values is None or TOKEN_TYPES in values:
        documents = list(*fill_absent([documents], columns))
        values = None
    rules, values = describe_columns(documents, columns, values)
    flat, sizes = join_token_columns(values, rules)
    num_empty = 0
    if not sizes or not all(sizes) or not all(per_row) or _has_masked(flat, rules):
        documents = [_without_masked(document, rules) for document in documents]
        documents, per_row, num_empty = _without_empty(documents, per_row)
        sizes = [len(document["input_ids"]) for document in documents]
        values = {name: [document[name] for document in documents] for name in rules}
        flat, _ = join_token_columns(values, rules)
    each = iter(sizes)
    lengths = tuple(tuple(islice(each, count)) for count in per_row)
    width = _row_length(lengths, row_length, pad_to_multiple_of)
    slots = Slots(lengths, width, position_start=position_ids_start)
    _make_labels(flat, slots.starts, rules, first_label=first_label, make_labels=make_labels)
    tokens = {
        name: slots.lay(values, _pad_value(name, rules.get(name), pad_token_id))
        for name, values in flat.items()
        if (name not in _SPENT or name in keep) and name != "position_ids"
    }
    if "position_ids" in flat and not np.array_equal(flat["position_ids"], slots.positions):
        raise ColumnError(
            f"The documents bring `position_ids` that do not count {position_ids_start}, {position_ids_start + 1}, ... "
            "inside each document, as every document alone would be numbered. Remove the column: positions are "
            "made from the boundaries."
        )
    joined = {
        name: join_media(name, values[name]) for name, rule in rules.items() if rule.kind == "media"
    }
    numbered = media.number(
        documents, slots.positions, text_only=not joined and TOKEN_TYPES not in rules
    )
    return PackedBatch(
        tokens=tokens,
        per_document=_per_document(values, rules),
        media={name: value for name, value in joined.items() if value is not None},
        document_map=slots.document_map(),
        position_ids=slots.lay_positions(numbered),
        cu_seqlens=slots.cu_seqlens,
        max_seqlen=slots.max_seqlen,
        seq_idx=slots.seq_idx(),
        lengths=lengths,
        num_empty=num_empty,
    )


def _has_masked(flat: Mapping[str, NDArray[Any]], rules: Mapping[str, ColumnRule]) -> bool:
    """Whether an `attention_mask` may call a token padding."""
    mask = flat.get("attention_mask")
    return "attention_mask" in rules if mask is None else not mask.all()


def _without_masked(document: Document, rules: Mapping[str, ColumnRule]) -> Document:
    """Leave out tokens that a 0/1 `attention_mask` calls padding: packed, they would be text."""
    mask = document.get("attention_mask")
    if mask is None:
        return document
    keep = np.asarray(mask) != 0
    if keep.all():
        return document
    return {
        name: np.asarray(values)[keep] if rules[name].kind == "token" else values
        for name, values in document.items()
    }


def _without_empty(
    documents: list[Document], per_row: Sequence[int]
) -> tuple[list[Document], list[int], int]:
    """Leave out documents without a token, then rows without a document, and count the documents."""
    full = [len(document["input_ids"]) > 0 for document in documents]
    num_empty = full.count(False)
    each = iter(full)
    kept = [count for count in (sum(islice(each, held)) for held in per_row) if count]
    if not kept:
        raise ColumnError(_NO_TOKEN)
    if num_empty:
        warnings.warn(
            f"{num_empty} empty document(s) were left out of a packed batch. Filter them out of the data set to "
            "keep counts by document exact.",
            stacklevel=4,
        )
    return list(compress(documents, full)), kept, num_empty


def _row_length(
    lengths: tuple[tuple[int, ...], ...], row_length: int | None, multiple: int | None
) -> int:
    longest = max(sum(row) for row in lengths)
    width = longest if row_length is None else row_length
    if longest > width:
        raise ColumnError(
            f"A row holds {longest} tokens but row_length is {width}: {longest - width} tokens would be cut off. Pack "
            "with max_length <= row_length, or raise row_length."
        )
    return width if multiple is None else -(-width // multiple) * multiple


def _make_labels(
    flat: dict[str, NDArray[Any]],
    starts: NDArray[np.int64],
    rules: Mapping[str, ColumnRule],
    *,
    first_label: int | None,
    make_labels: bool,
) -> None:
    """Write the labels of the row into `flat`: masked by the label masks, cut at document starts."""
    if "labels" in flat:
        labels = flat["labels"]
    elif "labels" in rules or not make_labels:
        return
    else:
        labels = flat["input_ids"].copy()
    for name in LABEL_MASKS:
        if name in flat:
            labels[flat[name] == 0] = IGNORE_INDEX
    if first_label is not None:
        labels[starts] = first_label
    flat["labels"] = labels


def _pad_value(name: str, rule: ColumnRule | None, pad_token_id: int) -> int | float | bool:
    if name == "input_ids":
        return pad_token_id
    return IGNORE_INDEX if rule is None else rule.pad_value


def _per_document(
    columns: Mapping[str, list[Any]], rules: Mapping[str, ColumnRule]
) -> dict[str, Any]:
    return {
        name: _as_numbers(columns[name], several=name in ("labels", "label"))
        for name, rule in rules.items()
        if rule.kind == "document"
    }


def _as_numbers(values: list[Any], *, several: bool) -> Any:
    """Make a tensor `[N]` of one number a document, `[N, K]` of several; leave anything else as it is."""
    numbers = all(isinstance(value, (int, float)) or hasattr(value, "dtype") for value in values)
    if not numbers and not (several and len({len(value) for value in values}) == 1):
        return values
    made = torch.as_tensor(np.asarray(values))
    if not any(hasattr(value, "dtype") for value in values) and made.is_floating_point():
        # Python floats are float64, and no float32 model takes the gradients of such a loss.
        return made.to(torch.get_default_dtype())
    return made
