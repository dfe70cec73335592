"""The documents of a `datasets.Dataset`: their rules, their lengths, and pieces of them on demand."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hf_neat_packing._compat import row_indices
from hf_neat_packing.columns import (
    DEFAULT_COLUMN_RULES,
    ColumnRule,
    check_document_lengths,
    resolve_column_rules,
)
from hf_neat_packing.dataset.arrow import ListColumn
from hf_neat_packing.dataset.label_masks import masks_among
from hf_neat_packing.dataset.masked_labels import MaskedLabels
from hf_neat_packing.errors import ColumnError

if TYPE_CHECKING:
    import datasets


class DocumentTable:
    """Open the columns of a data set for reading by document.

    Nothing is loaded: token columns are slices of the Arrow buffers, other columns are left to
    `datasets` (so that images are decoded when a document is read, and not before). A pickle
    holds the data set, which of a memory-mapped one means its paths, and the rules.

    Masks of trained tokens (`completion_mask`, `assistant_masks`, `loss_mask`) become labels, unless they are
    declared: trainers remove columns that a model does not take, and masks with them.

    Args:
        dataset: One document per row; shuffled, selected and sliced sets are read in their order.
        columns: Rules by column name, for names that the defaults do not know.

    Attributes:
        rules: The `ColumnRule` of each column that is read.

    Raises:
        ColumnError: If a column has no rule, no column holds tokens, a token column is nested or
            null somewhere, or the rows are made by a function that Arrow does not see.
    """

    def __init__(
        self, dataset: "datasets.Dataset", columns: Mapping[str, ColumnRule | str] | None = None
    ) -> None:
        self.dataset = dataset
        self.rules = _rules(dataset, columns)
        self._masks = masks_among(self.rules, columns)
        if self._masks:
            kept = {name: rule for name, rule in self.rules.items() if name not in self._masks}
            self.rules = {**kept, "labels": DEFAULT_COLUMN_RULES["labels"]}
        self._open()

    def _open(self) -> None:
        """Open the columns; repeated after unpickling, since views of buffers do not travel."""
        table = self.dataset.data.table
        self._rows = row_indices(self.dataset)
        self._tokens: dict[str, ListColumn | MaskedLabels] = {}
        self._others: dict[str, Callable[[Sequence[int]], list[Any]]] = {}
        names = self.dataset.column_names
        for name, rule in self.rules.items():
            if rule.kind == "token":
                if name in names:
                    self._tokens[name] = ListColumn(name, table.column(name))
            elif rule.kind != "ignore":
                self._others[name] = _Decoded(self.dataset, name)
        self._labels: MaskedLabels | None = None
        if self._masks:
            stored = "labels" if "labels" in names else "input_ids"
            masks = {name: ListColumn(name, table.column(name)) for name in self._masks}
            self._labels = MaskedLabels(ListColumn(stored, table.column(stored)), masks)
            self._tokens["labels"] = self._labels
        # Columns are mostly cut into the same chunks, and then share the search for a row.
        numbers: dict[tuple[int, ...], int] = {}
        self._layouts = {
            name: numbers.setdefault(column.first_rows, len(numbers))
            for name, column in self._tokens.items()
        }

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, `[documents]`, once all token columns agree on them.

        Raises:
            ColumnError: If two token columns disagree on a document.
        """
        lengths = {name: column.lengths() for name, column in self._tokens.items()}
        if self._labels is not None:
            lengths |= self._labels.lengths_of_masks()
        if self._rows is not None:
            lengths = {name: values[self._rows] for name, values in lengths.items()}
        check_document_lengths(lengths)
        return lengths["input_ids"] if "input_ids" in lengths else next(iter(lengths.values()))

    def read(
        self, documents: NDArray[np.integer[Any]], starts: Sequence[int], lengths: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Read pieces of documents from every column that is not ignored.

        Args:
            documents: The document of each piece, `[pieces]`.
            starts: The first token of each piece inside its document, `[pieces]`.
            lengths: The tokens of each piece, `[pieces]`.

        Returns:
            For each column one value per piece: 1-D arrays for token columns, decoded values for
            the others.
        """
        rows = documents if self._rows is None else self._rows[documents]
        pieces: dict[str, list[Any]] = {}
        chunks: dict[int, list[int]] = {}
        for name in self.rules:
            if name in self._tokens:
                column = self._tokens[name]
                layout = self._layouts[name]
                if layout not in chunks:
                    chunks[layout] = column.locate(rows)
                pieces[name] = column.read(rows, chunks[layout], starts, lengths)
            elif name in self._others:
                pieces[name] = self._others[name](documents.tolist())
        if "position_ids" in self._tokens and any(starts):
            # Positions restart in each piece, as they do in any document.
            positions = zip(pieces["position_ids"], starts, strict=True)
            pieces["position_ids"] = [p - p[0] if start else p for p, start in positions]
        return pieces

    def read_tokens(
        self,
        name: str,
        documents: NDArray[np.integer[Any]],
        starts: NDArray[np.int64] | None,
        lengths: NDArray[np.integer[Any]],
    ) -> pa.Array:
        """Lay pieces of one token column end to end, as one flat Arrow array `[tokens]`.

        Args:
            name: The column.
            documents: The document of each piece, `[pieces]`.
            starts: The first token of each piece inside its document, `[pieces]`; None: all at 0.
            lengths: The tokens of each piece, `[pieces]`.
        """
        rows = documents if self._rows is None else self._rows[documents]
        column = self._tokens[name]
        tokens = column.gather(rows, starts, lengths)
        if name == "position_ids" and starts is not None and starts.any():
            # Positions restart in each piece, as they do in any document.
            ends = np.cumsum(lengths, dtype=np.int64)
            first = tokens[np.minimum(ends - lengths, len(tokens) - 1)]
            tokens = tokens - np.repeat(np.where(starts > 0, first, 0), lengths).astype(
                tokens.dtype
            )
        return pa.array(tokens, type=column.value_type)

    def read_stored(self, name: str, documents: NDArray[np.integer[Any]]) -> pa.Array:
        """Return one document-level value per piece as Arrow stores it, not decoded, `[pieces]`."""
        selected = self.dataset.select_columns([name]).with_format("arrow")
        return selected[documents.tolist()].column(name).combine_chunks()

    @property
    def features(self) -> "datasets.Features":
        """The `datasets.Features` of the documents, with the labels that masks become."""
        features = self.dataset.features.copy()
        if self._labels is not None:
            features["labels"] = self._labels.feature()
        return features

    def has_media(self, document: int) -> str | None:
        """Return the name of a media column in which this document has something, if any."""
        for name, rule in self.rules.items():
            if rule.kind == "media":
                value = self._others[name]([document])[0]
                if value is not None and (not hasattr(value, "__len__") or len(value)):
                    return name
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "rules": self.rules, "_masks": self._masks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Decoded:
    """Read one document-level column as `datasets` decodes it."""

    def __init__(self, dataset: "datasets.Dataset", name: str) -> None:
        selected = dataset.select_columns([name])
        if dataset.format["type"] is None and _is_numeric_array(dataset.features[name]):
            # Pixels as Python lists would be many times slower to read, and larger.
            selected = selected.with_format("numpy")
        self._selected, self._name = selected, name

    def __call__(self, documents: Sequence[int]) -> list[Any]:
        """Return one value per document."""
        return list(self._selected[documents][self._name])


def _is_numeric_array(feature: Any) -> bool:
    """Tell whether a feature is a list, of any depth, of numbers."""
    depth = 0
    while not hasattr(feature, "dtype"):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if inner is None:
            return False
        feature, depth = inner, depth + 1
    is_array = hasattr(feature, "shape")
    number = feature.dtype.startswith(("int", "uint", "float", "bool"))
    return bool(number and (depth or is_array))


def _rules(
    dataset: "datasets.Dataset", declared: Mapping[str, ColumnRule | str] | None
) -> dict[str, ColumnRule]:
    """Give each visible column its rule, and check that there are tokens to pack."""
    if dataset.format["type"] == "custom":
        raise ColumnError(
            "The data set has a transform (set_transform / with_transform), so its rows are made "
            "when they are read and have no lengths to plan with. Accepted: stored token columns. "
            "Write dataset.with_format(None).map(transform, batched=True) first."
        )
    names = dataset.format["columns"] or dataset.column_names
    rules = resolve_column_rules(names, declared)
    for name, rule in rules.items():
        kind = dataset.data.table.schema.field(name).type
        scalar = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if rule.kind == "token" and scalar and name not in (declared or {}):
            # An integer `labels` is a class: one value per document.
            rules[name] = ColumnRule("document")
    if not any(rule.kind == "token" for rule in rules.values()):
        raise ColumnError(
            f"None of the columns {list(rules)} holds tokens, so there is nothing to pack. "
            "Accepted: a column of lists of token ids, such as input_ids. Tokenize first: "
            "dataset.map(lambda batch: tokenizer(batch['text']), batched=True)."
        )
    return rules
