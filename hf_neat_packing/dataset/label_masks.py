"""Which columns are masks of trained tokens, and a document with labels in their place."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hf_neat_packing.columns import LABEL_MASKS, ColumnRule
from hf_neat_packing.errors import ColumnError

IGNORED: Final = -100
"""The label that losses leave out."""


def masks_among(
    rules: Mapping[str, ColumnRule], declared: Mapping[str, ColumnRule | str] | None
) -> list[str]:
    """List the masks of trained tokens that become labels: undeclared ones, beside token ids and labels of tokens.

    Args:
        rules: The rule of each column.
        declared: The rules that were given; a declared mask stays what it is.
    """
    labels = rules.get("labels")
    if "input_ids" not in rules or (labels is not None and labels.kind != "token"):
        return []
    return [
        name
        for name in LABEL_MASKS
        if name in rules and name not in (declared or {}) and rules[name].kind == "token"
    ]


def with_labels(document: Mapping[str, Any], masks: Sequence[str]) -> dict[str, Any]:
    """Put labels in the place of a document's masks.

    Args:
        document: From column to value.
        masks: Names of its masks.

    Raises:
        ColumnError: If a mask has not one value per token.
    """
    labels = document.get("labels", document["input_ids"])
    trained = np.ones(len(labels), dtype=bool)
    for name in masks:
        if len(document[name]) != len(labels):
            raise ColumnError(
                f"Column {name!r} of a document has length {len(document[name])} where its tokens have length "
                f"{len(labels)}. Accepted: one value per token. Mend it, or write columns={{{name!r}: 'ignore'}}."
            )
        trained &= np.asarray(document[name]) != 0
    kept = {name: value for name, value in document.items() if name not in masks}
    masked = np.where(trained, np.asarray(labels, dtype=np.int64), IGNORED)
    return {**kept, "labels": masked.tolist() if isinstance(labels, list) else masked}
