"""Documents laid end to end into rows: the packed batch, before any model has a say in it.

Legend: `B` rows, `S` tokens in a row, `N` documents of the batch, `R` rows of positions.
"""

import struct
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .columns import LABEL_MASKS, ColumnRule, columns_of, measure_documents
from .errors import ColumnError
from .features import Document
from .loss_labels import IGNORE_INDEX
from .multimodal.layout import MediaLayout
from .multimodal.media import TOKEN_TYPES, fill_absent, join_media
from .slots import Slots

# Per-token columns that have done their work before the model.
_SPENT = (*LABEL_MASKS, "attention_mask", "special_tokens_mask")

_NO_MODEL = MediaLayout()


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
    rows: Sequence[Sequence[Document]],
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
        rows: the documents of each row. Token columns are lists, arrays or tensors.
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
    documents = list(chain.from_iterable(rows))
    values = columns_of(documents) if documents else None
    if values is None or TOKEN_TYPES in values:
        rows = fill_absent(rows, columns)
        documents = list(chain.from_iterable(rows))
        values = None
    rules, sizes = measure_documents(documents, columns, values)
    num_empty = 0
    if "attention_mask" in rules or not sizes or not all(sizes):
        rows, num_empty = _without_empty([_drop_masked(row, rules) for row in rows])
        documents = list(chain.from_iterable(rows))
        sizes = [len(document["input_ids"]) for document in documents]
        values = None
    if values is None:
        values = {name: [document[name] for document in documents] for name in rules}
    each = iter(sizes)
    lengths = tuple(tuple(islice(each, len(row))) for row in rows)
    width = _row_length(lengths, row_length, pad_to_multiple_of)
    slots = Slots(lengths, np.array(sizes, dtype=np.int64), width)
    flat = {
        name: _concatenate(name, values[name])
        for name, rule in rules.items()
        if rule.kind == "token"
    }
    _make_labels(flat, slots.starts, rules, first_label=first_label, make_labels=make_labels)
    tokens = {
        name: slots.lay(values, _pad_value(name, rules.get(name), pad_token_id))
        for name, values in flat.items()
        if (name not in _SPENT or name in keep) and name != "position_ids"
    }
    positions = slots.positions + position_ids_start
    if "position_ids" in flat and not np.array_equal(flat["position_ids"], positions):
        raise ColumnError(
            f"The documents bring `position_ids` that do not count {position_ids_start}, {position_ids_start + 1}, ... "
            "inside each document, as every document alone would be numbered. Remove the column: positions are "
            "made from the boundaries."
        )
    joined = {
        name: join_media(name, [document[name] for document in documents])
        for name, rule in rules.items()
        if rule.kind == "media"
    }
    numbered = media.number(documents, positions, text_only=not joined and TOKEN_TYPES not in rules)
    return PackedBatch(
        tokens=tokens,
        per_document=_per_document(documents, rules),
        media={name: value for name, value in joined.items() if value is not None},
        document_map=slots.lay(slots.row_documents, 0),
        position_ids=slots.lay_positions(numbered, position_ids_start),
        cu_seqlens=slots.cu_seqlens,
        max_seqlen=slots.max_seqlen,
        seq_idx=slots.seq_idx(),
        lengths=lengths,
        num_empty=num_empty,
    )


def _drop_masked(row: Sequence[Document], rules: Mapping[str, ColumnRule]) -> list[Document]:
    """Leave out tokens that a 0/1 `attention_mask` calls padding: packed, they would be text."""
    documents: list[Document] = []
    for document in row:
        mask = document.get("attention_mask")
        if mask is None:
            documents.append(document)
            continue
        keep = np.asarray(mask) != 0
        if keep.all():
            documents.append(document)
            continue
        documents.append(
            {
                name: np.asarray(values)[keep] if rules[name].kind == "token" else values
                for name, values in document.items()
            }
        )
    return documents


def _without_empty(rows: list[list[Document]]) -> tuple[list[list[Document]], int]:
    kept = [[document for document in row if len(document["input_ids"])] for row in rows]
    num_empty = sum(map(len, rows)) - sum(map(len, kept))
    kept = [row for row in kept if row]
    if not kept:
        raise ColumnError(
            "Every document of the batch is empty (no token): there is nothing to train on, and no boundary to "
            "keep. Filter empty documents out of the data set."
        )
    if num_empty:
        warnings.warn(
            f"{num_empty} empty document(s) were left out of a packed batch. Filter them out of the data set to "
            "keep counts by document exact.",
            stacklevel=4,
        )
    return kept, num_empty


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


def _concatenate(name: str, values: Sequence[Any]) -> NDArray[Any]:
    """Join the values of a token column; whole numbers become int64."""
    if isinstance(values[0], list):
        return _join_lists(values)
    kinds = set(map(type, values))
    if kinds == {Tensor} and {value.ndim for value in values} == {1}:
        joined: NDArray[Any] = torch.cat(tuple(values)).numpy()
    else:
        arrays = values if kinds == {np.ndarray} else [np.asarray(value) for value in values]
        if arrays[0].ndim != 1:
            raise ColumnError(
                f"Column {name!r} of a document has shape {list(arrays[0].shape)}; a token column has one value per "
                f"token, [tokens]. Write columns={{{name!r}: 'media'}} if it holds rows of something else."
            )
        joined = np.concatenate(arrays)
    return joined.astype(np.int64, copy=False) if joined.dtype.kind in "iub" else joined


def _join_lists(values: Sequence[Any]) -> NDArray[Any]:
    """Join lists of Python numbers."""
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, list) else value.tolist()
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


def _per_document(documents: list[Document], rules: Mapping[str, ColumnRule]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, rule in rules.items():
        if rule.kind == "document":
            values = [document[name] for document in documents]
            result[name] = _as_numbers(values, several=name in ("labels", "label"))
    return result


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
