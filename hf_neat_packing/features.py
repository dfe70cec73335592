"""What a loader hands to the collator: documents, packs of documents, lists of documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .errors import ColumnError

Document = Mapping[str, Any]
"""One training example: column -> one value per token, or one value."""


def split_packs(features: Sequence[Any]) -> tuple[list[Document], bool, list[int]]:
    """Read features as documents in one line.

    Args:
        features: documents, packs (nested columns: one inner list per document) or lists of
            documents.

    Returns:
        The documents, whether any feature is a pack or a list, and how many documents each feature holds.

    Raises:
        ColumnError: features without `input_ids`, or packs whose columns disagree on the number of documents.
    """
    if _are_documents(features):
        return list(features), False, [1] * len(features)
    documents: list[Document] = []
    packs, counts = False, []
    for index, feature in enumerate(features):
        pack = _is_pack(feature)
        packs = packs or pack
        held = _documents_of(feature, index) if pack else [_document(feature, index)]
        documents += held
        counts.append(len(held))
    return documents, packs, counts


def _are_documents(features: Sequence[Any]) -> bool:
    """Whether all features are documents of one usual form; False says that each is to be looked at."""
    if set(map(type, features)) != {dict}:
        return False
    try:
        ids = [feature["input_ids"] for feature in features]
    except KeyError:
        return False
    if isinstance(ids[0], Tensor):
        try:
            return set(map(Tensor.dim, ids)) == {1}
        except TypeError:  # not all are tensors
            return False
    kinds = set(map(type, ids))
    if kinds == {list}:
        return {type(value[0]) for value in ids if value} == {int}
    if kinds != {np.ndarray} or {value.ndim for value in ids} != {1}:
        return False
    return not any(dtype.hasobject for dtype in {value.dtype for value in ids})


def _is_pack(feature: Any) -> bool:
    """Whether a feature holds several documents in nested columns, or is a list of documents."""
    if isinstance(feature, (list, tuple)):
        return True
    ids = feature.get("input_ids") if isinstance(feature, (dict, Mapping)) else None
    if ids is None or len(ids) == 0:
        return False
    if isinstance(ids, (np.ndarray, Tensor)) and ids.dtype != object:
        return ids.ndim > 1
    return isinstance(ids[0], (list, tuple)) or getattr(ids[0], "ndim", 0) >= 1


def _document(feature: Any, index: int) -> Document:
    if not isinstance(feature, (dict, Mapping)) or "input_ids" not in feature:
        found = sorted(feature) if isinstance(feature, Mapping) else type(feature).__name__
        raise ColumnError(
            f"Feature {index} has no `input_ids` (found: {found}). A document is a mapping with one id per token; "
            "tokenize the data first, and check that the Trainer did not remove the column."
        )
    return feature


def _documents_of(feature: Any, index: int) -> list[Document]:
    if isinstance(feature, (list, tuple)):
        return [document for part in feature for document in _documents_of(part, index)]
    if not _is_pack(feature):
        return [_document(feature, index)]
    count = len(feature["input_ids"])
    for name, values in feature.items():
        if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != count:
            raise ColumnError(
                f"Pack {index} holds {count} documents in `input_ids` but not {count} values in column {name!r}. "
                "In a pack every column is a list with one entry per document; pack the column too, or remove it."
            )
    return [
        dict(zip(feature, values, strict=True)) for values in zip(*feature.values(), strict=True)
    ]
