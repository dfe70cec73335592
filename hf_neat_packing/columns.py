"""How each column of a dataset is packed; a column without a rule is an error, never a guess.

Four kinds cover what people train on:

- `token`: one value per token; laid end to end, padded with `pad_value`.
- `document`: one value per document; a pack has a list of them, in document order.
- `media`: rows of pixels, frames or grids that belong to a document's placeholders; joined in
  document order and never cut.
- `ignore`: left out of the pack.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hf_neat_packing.column_names import (
    BOUNDARY_COLUMNS,
    DOCUMENT_COLUMNS,
    LABEL_COLUMNS,
    MEDIA_COLUMNS,
    TOKEN_COLUMNS,
)
from hf_neat_packing.errors import ColumnError

ColumnKind = Literal["token", "document", "media", "ignore"]
_KINDS: tuple[ColumnKind, ...] = get_args(ColumnKind)


@dataclass(frozen=True)
class ColumnRule:
    """State how one column is packed.

    Args:
        kind: `token`, `document`, `media` or `ignore`, as the module says.
        pad_value: What fills a token column past the last document. Other kinds do not use it.

    Raises:
        ColumnError: If `kind` is none of the four.
    """

    kind: ColumnKind
    pad_value: int | float | bool = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ColumnError(
                f"A column rule has kind {self.kind!r}, which says nothing about how to pack the "
                f"column. Accepted kinds: {', '.join(_KINDS)}. Write e.g. ColumnRule('token')."
            )


_DOCUMENT = ColumnRule("document")

DEFAULT_COLUMN_RULES: Mapping[str, ColumnRule] = {
    **dict.fromkeys(TOKEN_COLUMNS, ColumnRule("token")),
    **dict.fromkeys(LABEL_COLUMNS, ColumnRule("token", pad_value=-100)),
    **dict.fromkeys(DOCUMENT_COLUMNS, _DOCUMENT),
    **dict.fromkeys(MEDIA_COLUMNS, ColumnRule("media")),
}
"""The rule of every column name that means the same thing across Transformers and TRL."""

LABEL_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns that say which tokens are trained on; they act on labels and are no input of a model."""


def resolve_column_rules(
    names: Iterable[str], declared: Mapping[str, ColumnRule | str] | None = None
) -> dict[str, ColumnRule]:
    """Give every column its rule: the declared one, else the default for its name.

    Args:
        names: Column names, in the order in which they are wanted back.
        declared: Rules, or their kinds as strings, by column name; they go before the defaults.
            Names that are not in `names` do no harm, so that one declaration serves several sets.

    Returns:
        A rule for each name.

    Raises:
        ColumnError: If a column has no rule, if it holds the boundaries of an already packed set,
            or if a declared kind is not one of the four.
    """
    declared = declared or {}
    rules: dict[str, ColumnRule] = {}
    unknown: list[str] = []
    packed: list[str] = []
    for name in names:
        rule = declared.get(name, DEFAULT_COLUMN_RULES.get(name))
        if isinstance(rule, str):
            rule = ColumnRule(_as_kind(name, rule))
        if rule is not None:
            rules[name] = rule
        elif name in BOUNDARY_COLUMNS:
            packed.append(name)
        else:
            unknown.append(name)
    if packed:
        raise ColumnError(
            f"The columns {packed} hold the boundaries of rows that are packed already; packing "
            "these rows again would join documents across them. Accepted: one document per row. "
            "Write nest_flat_packs(dataset) to read such a set as it is."
        )
    if unknown:
        line = ", ".join(f'"{name}": "..."' for name in unknown)
        raise ColumnError(
            f"No packing rule for the columns {unknown}. Whether they hold one value per token or "
            "one per document cannot be told from the data without guessing, and a wrong guess "
            f"shifts values between documents. Accepted kinds: {', '.join(_KINDS)}. "
            f"Write columns={{{line}}} with the kind of each, or remove the columns."
        )
    return rules


def _as_kind(name: str, kind: str) -> ColumnKind:
    """Return `kind` as one of the four, or say which column it was declared for."""
    for known in _KINDS:
        if kind == known:
            return known
    raise ColumnError(
        f"Column {name!r} is declared as {kind!r}, which is not a kind of column. "
        f"Accepted: {', '.join(_KINDS)}. Write columns={{{name!r}: 'token'}}."
    )


def check_document_lengths(
    lengths: Mapping[str, Sequence[int] | NDArray[np.integer[Any]]],
) -> None:
    """Check that the token columns agree on the length of every document.

    Args:
        lengths: For each token column, the length in tokens of each document: a sequence or an
            integer array `[documents]`, all in the same order of documents.

    Raises:
        ColumnError: If two columns disagree; names both columns, the document and both lengths.
    """
    columns = iter(lengths.items())
    first_name, first = next(columns, ("", ()))
    for name, other in columns:
        # Lists compare in C and batches are small; arrays are for whole datasets.
        same = (
            first == other
            if isinstance(first, list) and isinstance(other, list)
            else np.array_equal(np.asarray(first), np.asarray(other))
        )
        if not same:
            _raise_disagreement(first_name, np.asarray(first), name, np.asarray(other))


def _raise_disagreement(
    first_name: str,
    first: NDArray[np.integer[Any]],
    name: str,
    other: NDArray[np.integer[Any]],
) -> None:
    """Raise for the first document on which two columns disagree."""
    if len(first) != len(other):
        found = f"Column {name!r} has {len(other)} documents where {first_name!r} has {len(first)}"
    else:
        bad = np.flatnonzero(first != other)
        document = int(bad[0])
        more = f" (and {len(bad) - 1} more documents)" if len(bad) > 1 else ""
        found = (
            f"Column {name!r} of document {document} has length {int(other[document])} where "
            f"{first_name!r} has length {int(first[document])}{more}"
        )
    raise ColumnError(
        f"{found}. Laid end to end, every value after it would belong to another token. Accepted: "
        "token columns with one value per token of their document. Mend the column where it is "
        f"made, or write columns={{{name!r}: 'document'}} if it holds one value per document, or "
        "'ignore'."
    )


def describe_documents(
    documents: Sequence[Mapping[str, Any]],
    declared: Mapping[str, ColumnRule | str] | None = None,
) -> dict[str, ColumnRule]:
    """Check a list of documents before they are joined, and give the rule of each column.

    A scalar under a token column's name, such as an integer `labels` for classification, is one
    value per document.

    Args:
        documents: At least one mapping from column to value; token columns are sequences or 1-D
            arrays with one value per token.
        declared: As for `resolve_column_rules`.

    Returns:
        The rule for each column, in the order of the first document.

    Raises:
        ColumnError: If a column has no rule, if the documents do not have the same columns, if a
            value is missing (`None`), or if the lengths of the token columns disagree.
    """
    rules, columns = describe_columns(documents, declared)
    check_document_lengths(
        {
            name: token_lengths(name, columns[name])
            for name, rule in rules.items()
            if rule.kind == "token"
        }
    )
    return rules


def columns_of(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]] | None:
    """Give the values of each column in document order; None where documents differ in columns.

    Args:
        documents: At least one mapping from column to value.
    """
    names = list(documents[0]) if documents else []
    # Documents that have all these columns have no other ones if they have as many in all.
    if not names or sum(map(len, documents)) != len(names) * len(documents):
        return None
    try:
        return {name: [document[name] for document in documents] for name in names}
    except KeyError:
        return None


def describe_columns(
    documents: Sequence[Mapping[str, Any]],
    declared: Mapping[str, ColumnRule | str] | None = None,
    columns: dict[str, list[Any]] | None = None,
) -> tuple[dict[str, ColumnRule], dict[str, list[Any]]]:
    """Give the rule of each column, as `describe_documents` does, and its values in document order.

    The values of token columns are not looked at; joining them does that.

    Args:
        documents: As for `describe_documents`.
        declared: As for `resolve_column_rules`.
        columns: What `columns_of` gave for them, where that is known.
    """
    rules = resolve_column_rules(documents[0], declared)
    columns = columns or columns_of(documents)
    if columns is None:
        _require_columns(documents)
        columns = {}
    for name, rule in rules.items():
        if rule.kind == "token" and all(map(_is_scalar, columns[name])):
            rules[name] = _DOCUMENT
    return rules, columns


def _require_columns(documents: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the first document that has not the columns of document 0."""
    names = documents[0].keys()
    for index, document in enumerate(documents):
        if document.keys() != names:
            odd = sorted(document.keys() ^ names)
            raise ColumnError(
                f"Document {index} and document 0 do not have the same columns: {odd} is in only "
                "one of them. Joined, the values would belong to other documents. Accepted: "
                "documents with the same columns. Add the column to all of them or remove it."
            )


def _is_scalar(value: Any) -> bool:
    """Tell whether a value is one number rather than a row of them."""
    return isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0


def token_lengths(name: str, values: Sequence[Any]) -> list[int]:
    """Return the tokens of each value of a token column.

    Raises:
        ColumnError: If a value has no length; names it.
    """
    try:
        return list(map(len, values))
    except TypeError:
        bad = next(i for i, value in enumerate(values) if value is None or _is_scalar(value))
    found = "no value (None)" if values[bad] is None else f"the single value {values[bad]!r}"
    raise ColumnError(
        f"Column {name!r} of document {bad} has {found} where one value per token is needed. "
        "Accepted: a list or array as long as the document. Fill it in, remove the document, or "
        f"write columns={{{name!r}: 'ignore'}}."
    )
