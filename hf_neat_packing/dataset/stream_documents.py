"""Documents of a stream: checked block by block, and cut by policy into rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any

from hf_neat_packing.columns import ColumnRule, describe_documents, resolve_column_rules
from hf_neat_packing.dataset.label_masks import masks_among, with_labels
from hf_neat_packing.dataset.stream_rows import DocumentsByColumn, Row
from hf_neat_packing.errors import ColumnError, PlanningError
from hf_neat_packing.planning import Accounting, OnEmpty, OnOverlong, TruncateSide, plan_packing

Piece = tuple[Row, int]


class DocumentCutter:
    """Turn each document into pieces of 1 to `max_length` tokens, and count what became of it.

    Args:
        max_length: The most tokens of a piece.
        on_overlong: `error`, `truncate`, `split` or `drop`.
        truncate_side: The side that `truncate` cuts.
        min_length: Documents with fewer tokens are dropped.
        on_empty: `drop` or `error`.
        columns: Rules by column name, for names that the defaults do not know.

    Attributes:
        max_length: As given.
        columns: Names of the columns of a row; none before the first document.
    """

    def __init__(
        self,
        max_length: int,
        *,
        on_overlong: OnOverlong,
        truncate_side: TruncateSide,
        min_length: int,
        on_empty: OnEmpty,
        columns: Mapping[str, ColumnRule | str] | None,
    ) -> None:
        self._policy: dict[str, Any] = {
            "on_overlong": on_overlong,
            "truncate_side": truncate_side,
            "min_length": min_length,
            "on_empty": on_empty,
        }
        # The planner checks the options; nothing is planned here.
        self.max_length = plan_packing([], max_length, **self._policy).max_length
        self._shortest = max(1, min_length)
        self._declared = columns
        self._rules: dict[str, ColumnRule] = {}
        self._masks: list[str] = []
        self.columns: tuple[str, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self._counts = Accounting(documents=0, tokens=0)
        self._documents = self._tokens = self._longest = 0

    def settings(self) -> dict[str, Any]:
        """Return what decides the pieces besides the documents."""
        return {"max_length": self.max_length, **self._policy}

    def token_columns(self, names: Iterable[str]) -> set[str]:
        """Say which of these columns hold one value per token."""
        rules = resolve_column_rules(names, self._declared)
        return {name for name, rule in rules.items() if rule.kind == "token"}

    def accounting(self) -> Accounting:
        """Return what became of every document and token so far."""
        return replace(
            self._counts, documents=self._documents, tokens=self._tokens, longest=self._longest
        )

    def counts(self) -> dict[str, int]:
        """Return the accounting as plain integers, for a state."""
        return asdict(self.accounting())

    def restore(self, counts: Mapping[str, int]) -> None:
        """Count on from a state."""
        self._counts = Accounting(**counts)
        self._documents, self._tokens = self._counts.documents, self._counts.tokens
        self._longest = self._counts.longest

    def take(
        self, documents: Sequence[Mapping[str, Any]], index: int
    ) -> tuple[list[Row], list[int]]:
        """Check documents, count them, and cut those that are too long or too short by policy.

        Args:
            documents: From column to value.
            index: The place of the first in the stream, for messages.

        Returns:
            One row for each piece, and the tokens of each.

        Raises:
            ColumnError: If columns are missing, unknown, null or of other lengths, or if a
                document with media would be cut.
            PlanningError: If a document is too long or empty and the policy is `error`.
        """
        if not self._rules:
            self._describe(documents[0], index)
        if self._masks:
            documents = [self._labelled(document) for document in documents]
        rows, lengths = self._read(documents) or self._read_each(documents, index)
        if self._kept is not None:
            rows = list(map(self._kept, rows))
        self._documents += len(documents)
        self._tokens += sum(lengths)
        self._longest = max(self._longest, *lengths) if lengths else self._longest
        if self._shortest <= min(lengths) and max(lengths) <= self.max_length:
            return rows, lengths
        pieces: list[Piece] = []
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True), index):
            if self._shortest <= length <= self.max_length:
                pieces.append((row, length))
            else:
                pieces += self._by_policy(row, length, place)
        return [row for row, _ in pieces], [length for _, length in pieces]

    def _labelled(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put labels in the place of masks; a document without them is left for the check to name."""
        whole = isinstance(document, Mapping) and {"input_ids", *self._masks} <= document.keys()
        return with_labels(document, self._masks) if whole else document

    def _read(self, documents: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[int]] | None:
        """Read documents column by column; None where some document is not as it should be."""
        try:
            if isinstance(documents, DocumentsByColumn):
                if documents.columns.keys() != self._rules.keys():
                    return None
                columns: list[Sequence[Any]] = [documents.columns[name] for name in self._rules]
                rows: list[Row] = list(zip(*columns, strict=True))
            else:
                if set(map(len, documents)) != {len(self._rules)}:
                    return None
                rows = list(map(self._all, documents))
                columns = list(zip(*rows, strict=True))
            lengths, *others = [list(map(len, columns[place])) for place in self._token_places]
        except (KeyError, TypeError):
            return None
        return (rows, lengths) if all(other == lengths for other in others) else None

    def _read_each(
        self, documents: Sequence[Mapping[str, Any]], index: int
    ) -> tuple[list[Row], list[int]]:
        """Read documents one by one, and raise for the first that is not as it should be."""
        for place, document in enumerate(documents, index):
            self._check(document, place)
        rows = [tuple(document[name] for name in self._rules) for document in documents]
        return rows, [len(document[self._first]) for document in documents]

    def _describe(self, document: Mapping[str, Any], index: int) -> None:
        """Resolve the rules of the columns by the first document."""
        _check_is_mapping(document, index)
        rules = describe_documents([document], self._declared)
        self._masks = masks_among(rules, self._declared)
        if self._masks:
            rules = describe_documents([with_labels(document, self._masks)], self._declared)
        tokens = [name for name, rule in rules.items() if rule.kind == "token"]
        if not tokens:
            raise ColumnError(
                f"None of the columns {list(rules)} holds tokens, so there is nothing to "
                "pack. Accepted: a column of token ids, such as input_ids. Tokenize first."
            )
        self._first, *self._others = tokens
        names = list(rules)
        self._token_places = [names.index(name) for name in tokens]
        kept = [name for name, rule in rules.items() if rule.kind != "ignore"]
        self._all = _getter(names)
        self._kept = None if kept == names else _getter([names.index(name) for name in kept])
        self._rules, self.columns = rules, tuple(kept)

    def _check(self, document: Mapping[str, Any], index: int) -> None:
        """Raise for a document that is not like the first one, or disagrees with itself."""
        _check_is_mapping(document, index)
        odd = sorted(document.keys() ^ self._rules.keys())
        if odd:
            raise ColumnError(
                f"Document {index} of the stream and the first one do not have the same columns: "
                f"{odd} is in only one of them. Joined, values would belong to other documents. "
                "Accepted: documents with the same columns. Add or remove the column."
            )
        expected = len(document[self._first]) if _has_length(document[self._first]) else None
        for name in (self._first, *self._others):
            value = document[name]
            if expected is None or not _has_length(value):
                found = f"is {value!r}"
            elif len(value) != expected:
                found = f"has length {len(value)} where {self._first!r} has length {expected}"
            else:
                continue
            raise ColumnError(
                f"Column {name!r} of document {index} {found}. Laid end to end, values would "
                "belong to other tokens. Accepted: one value per token of the document in every "
                f"token column. Mend it, or write columns={{{name!r}: 'document'}} or 'ignore'."
            )

    def _by_policy(self, row: Row, length: int, index: int) -> list[Piece]:
        """Drop, cut or split a document that is too short or too long, and count it."""
        counts, policy, limit = self._counts, self._policy["on_overlong"], self.max_length
        dropped = counts.tokens_dropped + length
        if not length and self._policy["on_empty"] == "error":
            raise PlanningError(
                f"Document {index} of the stream is empty and on_empty='error'. Remove it, or "
                "write on_empty='drop' to drop and count empty documents."
            )
        if not length:
            self._counts = replace(counts, dropped_empty=counts.dropped_empty + 1)
        elif length < self._shortest:
            short = counts.dropped_short + 1
            self._counts = replace(counts, dropped_short=short, tokens_dropped=dropped)
        elif policy == "drop":
            over = counts.dropped_overlong + 1
            self._counts = replace(counts, dropped_overlong=over, tokens_dropped=dropped)
        elif policy == "error":
            raise PlanningError(
                f"Document {index} of the stream has {length} tokens and max_length is {limit}; it "
                "fits in no pack. Raise max_length, or choose what is lost: on_overlong='truncate' "
                "cuts it, 'split' makes several documents of it, 'drop' leaves it out."
            )
        else:
            return self._cut_tokens(row, length, index)
        return []

    def _cut_tokens(self, row: Row, length: int, index: int) -> list[Piece]:
        """Truncate or split a document of tokens."""
        limit, counts = self.max_length, self._counts
        document = dict(zip(self.columns, row, strict=True))
        self._refuse_media(document, length, index)
        if self._policy["on_overlong"] == "split":
            self._counts = replace(counts, documents_split=counts.documents_split + 1)
            starts = range(0, length, limit)
            return [
                (self._slice(document, s, min(s + limit, length)), min(limit, length - s))
                for s in starts
            ]
        self._counts = replace(
            counts,
            documents_cut=counts.documents_cut + 1,
            tokens_cut=counts.tokens_cut + length - limit,
        )
        start = length - limit if self._policy["truncate_side"] == "left" else 0
        return [(self._slice(document, start, start + limit), limit)]

    def _slice(self, document: Mapping[str, Any], start: int, stop: int) -> Row:
        """Return the tokens `start` to `stop` of each token column; positions restart."""
        tokens = {self._first, *self._others}
        piece = {n: v[start:stop] if n in tokens else v for n, v in document.items()}
        if start and "position_ids" in tokens:
            positions = piece["position_ids"]
            first = positions[0]
            is_list = isinstance(positions, (list, tuple))
            piece["position_ids"] = [p - first for p in positions] if is_list else positions - first
        return tuple(piece.values())

    def _refuse_media(self, document: Mapping[str, Any], length: int, index: int) -> None:
        """Raise if a document with media would be cut: placeholders would lose their pixels."""
        for name, value in document.items():
            has = value is not None and (not hasattr(value, "__len__") or len(value) > 0)
            if self._rules[name].kind == "media" and has:
                raise ColumnError(
                    f"Document {index} of the stream has {length} tokens and media in {name!r}, "
                    f"and on_overlong={self._policy['on_overlong']!r} would cut it at "
                    f"{self.max_length}: placeholders would lose their pixels, or the reverse. "
                    "Accepted for documents with media: on_overlong='drop' or 'error', or a "
                    "larger max_length."
                )


def _has_length(value: Any) -> bool:
    """Tell whether a value is a row of values rather than one number or nothing."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def _getter(keys: Sequence[Any]) -> Callable[[Any], Row]:
    """Return a function that gives the values of `keys` as a row."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return partial(_alone, keys[0])


def _alone(key: Any, values: Any) -> Row:
    """Give one value as a row; a lambda could not be sent to a worker."""
    return (values[key],)


def _check_is_mapping(document: Any, index: int) -> None:
    """Raise for a document that is no mapping."""
    if not isinstance(document, Mapping):
        raise ColumnError(
            f"Document {index} of the stream is a {type(document).__name__}. Accepted: a dict "
            "from column name to value. Write e.g. ({'input_ids': ids} for ids in documents)."
        )
