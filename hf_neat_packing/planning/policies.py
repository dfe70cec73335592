"""What happens to documents that are too long, too short or empty, before anything is planned.

Nothing is lost without being counted: `Accounting` says what became of every document and token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from hf_neat_packing.errors import PlanningError

OnOverlong = Literal["error", "truncate", "split", "drop"]
OnEmpty = Literal["drop", "error"]
TruncateSide = Literal["right", "left"]

IntArray = npt.NDArray[np.integer[Any]]
Lengths = Sequence[int] | IntArray

MAX_DOCUMENTS = 2**31 - 1

# Documents looked at a time, so that they stay in cache for all that is asked of them.
BLOCK = 2**16


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Count what became of every document and every token.

    Documents: `documents == documents_kept + dropped_overlong + dropped_short + dropped_empty`.
    Tokens: `tokens == tokens_kept + tokens_cut + tokens_dropped`.

    Attributes:
        documents: Documents given.
        tokens: Tokens given.
        documents_cut: Kept documents that lost tokens to `on_overlong="truncate"`.
        tokens_cut: Tokens that they lost.
        documents_split: Kept documents that became more than one piece.
        dropped_overlong: Documents dropped because they were longer than the maximum.
        dropped_short: Documents dropped because they were shorter than `min_length`.
        dropped_empty: Documents of no tokens, which are always dropped.
        tokens_dropped: Tokens of the dropped documents.
        longest: Tokens of the longest document given.
    """

    documents: int
    tokens: int
    documents_cut: int = 0
    tokens_cut: int = 0
    documents_split: int = 0
    dropped_overlong: int = 0
    dropped_short: int = 0
    dropped_empty: int = 0
    tokens_dropped: int = 0
    longest: int = 0

    @property
    def documents_dropped(self) -> int:
        """Documents that are in no pack."""
        return self.dropped_overlong + self.dropped_short + self.dropped_empty

    @property
    def documents_kept(self) -> int:
        """Documents that are in a pack, whole, cut or split."""
        return self.documents - self.documents_dropped

    @property
    def tokens_kept(self) -> int:
        """Tokens that are in a pack."""
        return self.tokens - self.tokens_cut - self.tokens_dropped


class Pieces(NamedTuple):
    """The documents, or parts of documents, that are to be packed, in order of arrival.

    Attributes:
        lengths: int64 or int32 `[pieces]`, tokens.
        documents: int32 `[pieces]`, index of each piece's document; None when piece i is document i.
        starts: int64 `[pieces]`, first token of each piece; None when all start at 0.
    """

    lengths: IntArray
    documents: npt.NDArray[np.int32] | None
    starts: npt.NDArray[np.int64] | None


def as_lengths(lengths: Lengths) -> IntArray:
    """Check document lengths and return them as an int32 or int64 array.

    Args:
        lengths: Tokens of each document; any 1-D sequence of integers. int32 and int64 arrays are
            not copied.

    Raises:
        PlanningError: not one-dimensional, not integers, negative, or more than 2**31 - 1 of them.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise PlanningError(
            f"lengths has shape {array.shape}; a plan needs one number of tokens a document. "
            "Pass a flat sequence, for example [len(ids) for ids in dataset['input_ids']]."
        )
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise PlanningError(
            f"lengths has dtype {array.dtype}; a number of tokens is an integer. Pass integers, "
            "for example np.asarray(lengths, dtype=np.int64)."
        )
    if array.size > MAX_DOCUMENTS:
        raise PlanningError(
            f"{array.size} documents; a plan's indices are int32, so at most {MAX_DOCUMENTS} fit. "
            "Plan the dataset in shards."
        )
    if array.dtype not in (np.dtype(np.int64), np.dtype(np.int32)):
        if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
            raise PlanningError(f"a length of {int(array.max())} tokens does not fit in int64.")
        array = array.astype(np.int64)
    if int(array.min()) < 0:
        index = int(np.argmax(array < 0))
        raise PlanningError(
            f"document {index} has length {int(array[index])}; a number of tokens is never negative."
        )
    return array


def apply_policies(
    lengths: IntArray,
    max_length: int,
    *,
    on_overlong: OnOverlong,
    truncate_side: TruncateSide,
    min_length: int,
    on_empty: OnEmpty,
) -> tuple[Pieces, Accounting]:
    """Turn documents into pieces of 1 to `max_length` tokens and account for the rest.

    Args:
        lengths: int32 or int64 `[documents]`, checked by `as_lengths`.
        max_length: Most tokens a piece may have.
        on_overlong: What to do with longer documents.
        truncate_side: The side that `on_overlong="truncate"` cuts.
        min_length: Documents with fewer tokens are dropped.
        on_empty: What to do with documents of no tokens.

    Raises:
        PlanningError: an overlong or empty document where the policy is "error".
    """
    if not len(lengths):
        return Pieces(lengths, None, None), Accounting(documents=0, tokens=0)
    shortest, longest, tokens = _extent(lengths)
    total = {"documents": len(lengths), "tokens": tokens, "longest": longest}
    if shortest >= max(1, min_length) and longest <= max_length:
        return Pieces(lengths, None, None), Accounting(**total)
    empty = lengths == 0
    short = (lengths < min_length) & ~empty
    over = (lengths > max_length) & ~short
    if on_empty == "error" and empty.any():
        raise PlanningError(
            f"document {int(np.argmax(empty))} is empty ({int(empty.sum())} of {len(lengths)} are) "
            'and on_empty="error". Remove them, or write on_empty="drop" to drop and count them.'
        )
    if on_overlong == "error" and over.any():
        raise _overlong_error(lengths, over, max_length)
    drop = empty | short
    if on_overlong == "drop":
        drop |= over
    total.update(
        dropped_empty=int(empty.sum()),
        dropped_short=int(short.sum()),
        tokens_dropped=_exact_sum(lengths[drop]),
    )
    keep = np.flatnonzero(~drop).astype(np.int32)
    kept = lengths[keep]
    documents = keep if len(keep) < len(lengths) else None
    num_over = int(over.sum())
    if on_overlong == "drop":
        return Pieces(kept, documents, None), Accounting(**total, dropped_overlong=num_over)
    if not num_over:
        return Pieces(kept, documents, None), Accounting(**total)
    if on_overlong == "truncate":
        cut = np.maximum(kept, max_length) - max_length
        account = Accounting(**total, documents_cut=num_over, tokens_cut=_exact_sum(cut))
        starts = cut.astype(np.int64, copy=False) if truncate_side == "left" else None
        return Pieces(np.minimum(kept, max_length), documents, starts), account
    return _split(kept, keep, max_length), Accounting(**total, documents_split=num_over)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise `PlanningError` unless `value` is one of the strings of the `Literal` `choices`."""
    if value not in get_args(choices):
        accepted = ", ".join(repr(choice) for choice in get_args(choices))
        raise PlanningError(f"{name}={value!r} is not known; accepted are {accepted}.")


def _split(lengths: IntArray, documents: npt.NDArray[np.int32], max_length: int) -> Pieces:
    counts = -(-lengths // max_length)
    if int(counts.sum(dtype=np.int64)) > MAX_DOCUMENTS:
        raise PlanningError(
            f"splitting into pieces of {max_length} tokens gives {int(counts.sum())} pieces; at "
            f"most {MAX_DOCUMENTS} fit in a plan. Raise max_length, or plan in shards."
        )
    source = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts, dtype=np.int64) - counts
    starts = (np.arange(len(source), dtype=np.int64) - first[source]) * max_length
    pieces = np.minimum(lengths[source] - starts, max_length)
    return Pieces(pieces, documents[source], starts)


def _extent(lengths: IntArray) -> tuple[int, int, int]:
    """Find the shortest, the longest and the sum in one pass over memory."""
    blocks = [lengths[start : start + BLOCK] for start in range(0, len(lengths), BLOCK)]
    parts = [(int(block.min()), int(block.max()), _exact_sum(block)) for block in blocks]
    shortest, longest, tokens = zip(*parts, strict=True)
    return min(shortest), max(longest), sum(tokens)


def _exact_sum(lengths: IntArray) -> int:
    """Sum as a Python integer, exact even where an int64 sum would wrap."""
    if len(lengths) and int(lengths.max()) > (2**63 - 1) // len(lengths):
        return sum(lengths.tolist())
    return int(lengths.sum(dtype=np.int64))


def _overlong_error(
    lengths: IntArray, over: npt.NDArray[np.bool_], max_length: int
) -> PlanningError:
    index, count = int(np.argmax(over)), int(over.sum())
    others = f" ({count} of {len(lengths)} documents are too long)" if count > 1 else ""
    return PlanningError(
        f"document {index} has {int(lengths[index])} tokens and max_length is {max_length}{others}; "
        "it fits in no pack. Raise max_length, or choose what is lost: "
        'on_overlong="truncate" cuts it, "split" makes several documents of it, "drop" leaves it '
        "out. The report counts what was cut, split or dropped."
    )
