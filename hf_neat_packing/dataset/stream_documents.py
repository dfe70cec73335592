"""Documents of a stream: checked one by one, cut by policy, and written into a state."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from hf_neat_packing.columns import ColumnRule, describe_documents
from hf_neat_packing.errors import ColumnError, PlanningError
from hf_neat_packing.planning import Accounting, OnEmpty, OnOverlong, TruncateSide, plan_packing

Piece = tuple[Mapping[str, Any], int]


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
        shortest: The fewest tokens of a document that is not dropped.
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
        self.shortest = max(1, min_length)
        self._columns = columns
        self._rules: dict[str, ColumnRule] | None = None
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self._counts = Accounting(documents=0, tokens=0)
        self._documents = self._tokens = self._longest = 0

    def settings(self) -> dict[str, Any]:
        """Return what decides the pieces besides the documents."""
        return {"max_length": self.max_length, **self._policy}

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

    def measure(self, document: Mapping[str, Any], index: int) -> int:
        """Check a document, count it, and return its length in tokens.

        Args:
            document: From column to value.
            index: Its place in the stream, for messages.

        Raises:
            ColumnError: If columns are missing, unknown, null or of other lengths.
        """
        if self._rules is None:
            self._describe(document, index)
        if document.keys() != self._names:
            self._refuse(document, index)
        try:
            length = len(document[self._first])
            for name in self._others:
                if len(document[name]) != length:
                    self._refuse(document, index)
        except TypeError:
            self._refuse(document, index)
            raise
        self._documents += 1
        self._tokens += length
        if length > self._longest:
            self._longest = length
        return length

    def keep(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a document without its ignored columns."""
        if self._keeps_all:
            return document
        return {name: document[name] for name in self._kept}

    def cut(self, document: Mapping[str, Any], length: int, index: int) -> list[Piece]:
        """Return the pieces of a measured document of any length, each with its own.

        Args:
            document: What `keep` returned.
            length: What `measure` returned.
            index: Its place in the stream, for messages.

        Returns:
            No piece, one, or, for a split document, several.

        Raises:
            ColumnError: If a document with media would be cut.
            PlanningError: If it is too long or empty and the policy is `error`.
        """
        if self.shortest <= length <= self.max_length:
            return [(document, length)]
        return self._by_policy(document, length, index)

    def _describe(self, document: Mapping[str, Any], index: int) -> None:
        """Resolve the rules of the columns by the first document."""
        if not isinstance(document, Mapping):
            raise ColumnError(
                f"Document {index} of the stream is a {type(document).__name__}. Accepted: a dict "
                "from column name to value. Write e.g. ({'input_ids': ids} for ids in documents)."
            )
        self._rules = describe_documents([document], self._columns)
        tokens = [name for name, rule in self._rules.items() if rule.kind == "token"]
        if not tokens:
            raise ColumnError(
                f"None of the columns {list(self._rules)} holds tokens, so there is nothing to "
                "pack. Accepted: a column of token ids, such as input_ids. Tokenize first."
            )
        self._first, *self._others = tokens
        self._names = frozenset(document)
        self._kept = [name for name, rule in self._rules.items() if rule.kind != "ignore"]
        self._keeps_all = len(self._kept) == len(self._rules)

    def _refuse(self, document: Mapping[str, Any], index: int) -> None:
        """Raise for a document that is not like the first one, or disagrees with itself."""
        assert self._rules is not None
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

    def _by_policy(self, document: Mapping[str, Any], length: int, index: int) -> list[Piece]:
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
        elif length < self.shortest:
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
            return self._cut_tokens(document, length, index)
        return []

    def _cut_tokens(self, document: Mapping[str, Any], length: int, index: int) -> list[Piece]:
        """Truncate or split a document of tokens."""
        limit, counts = self.max_length, self._counts
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

    def _slice(self, document: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop` of each token column; positions restart."""
        tokens = {self._first, *self._others}
        piece = {n: v[start:stop] if n in tokens else v for n, v in document.items()}
        if start and "position_ids" in tokens:
            positions = piece["position_ids"]
            first = positions[0]
            is_list = isinstance(positions, (list, tuple))
            piece["position_ids"] = [p - first for p in positions] if is_list else positions - first
        return piece

    def _refuse_media(self, document: Mapping[str, Any], length: int, index: int) -> None:
        """Raise if a document with media would be cut: placeholders would lose their pixels."""
        assert self._rules is not None
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


def encode_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Write a document as values that compare and pickle plainly: arrays become bytes."""
    return {name: _encode(value) for name, value in document.items()}


def decode_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `encode_document` wrote."""
    return {name: _decode(value) for name, value in document.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("torch", *_encode(value.numpy())[1:])
    if isinstance(value, np.ndarray) and value.dtype != object:
        return ("numpy", value.dtype.str, value.shape, value.tobytes())
    return ("as it is", value)


def _decode(value: Any) -> Any:
    kind, *content = value
    if kind == "as it is":
        return content[0]
    dtype, shape, data = content
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return torch.from_numpy(array) if kind == "torch" else array
