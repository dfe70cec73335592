"""A cheap lower bound on the number of packs, and the length classes that it is computed from."""

import operator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning.policies import IntArray, Lengths, as_lengths

Int64Array = npt.NDArray[np.int64]

# Pieces counted at a time: counting reads them more than once, and copies them if they are int32.
COUNT_BLOCK = 2**16
# Entries of a table of counts per piece, from which on sorting the pieces is quicker.
TABLE_SHARE = 4


class LengthClasses(NamedTuple):
    """The distinct lengths, longest first, and how many pieces have each.

    Attributes:
        lengths: int64 `[classes]`, tokens, strictly decreasing.
        counts: int64 `[classes]`, at least 1.
    """

    lengths: Int64Array
    counts: Int64Array


def length_classes(lengths: IntArray, most: int) -> LengthClasses:
    """Count the distinct lengths, longest first.

    Args:
        lengths: int32 or int64 `[pieces]`, none negative.
        most: A length that none exceeds, such as the capacity of a pack.
    """
    if most > TABLE_SHARE * len(lengths):
        distinct, counts = np.unique(lengths, return_counts=True)
        return LengthClasses(distinct[::-1].astype(np.int64), counts[::-1].astype(np.int64))
    table = np.zeros(most + 1, dtype=np.int64)
    block = max(COUNT_BLOCK, most)
    for start in range(0, len(lengths), block):
        table += np.bincount(lengths[start : start + block], minlength=len(table))
    distinct = np.flatnonzero(table)[::-1]
    return LengthClasses(distinct, table[distinct])


def lower_bound(lengths: Lengths, max_length: int) -> int:
    """Compute a number of packs that no plan can go below.

    Args:
        lengths: Tokens of each document, 1-D integers from 0 to `max_length`.
        max_length: Capacity of a pack in tokens.

    Returns:
        The largest of the token bound `ceil(sum / max_length)`, the bound L2 and forty dual
        feasible functions; no plan has fewer packs, the best plan may have more.

    Raises:
        PlanningError: a length exceeds `max_length`, or is not a number of tokens.

    Source:
        S. Martello and P. Toth, Knapsack Problems (1990), section 8.3 (L2); C. Alves et al.,
        Dual-Feasible Functions for Integer Programming (2016), section 2 (u_k).
    """
    array = as_lengths(lengths)
    capacity = as_capacity(max_length)
    longest = int(array.max(initial=0))
    if longest > capacity:
        raise PlanningError(
            f"the longest document has {longest} tokens and max_length is {capacity}; the bound "
            "is defined for documents that fit in a pack."
        )
    return classes_lower_bound(length_classes(array, longest), capacity)


def as_capacity(max_length: int) -> int:
    """Check `max_length` and return it as a Python integer.

    Raises:
        PlanningError: it is not an integer of at least 1 and below 2**53.
    """
    if isinstance(max_length, bool):
        raise PlanningError(f"max_length={max_length}; give the tokens of a pack, such as 4096.")
    try:
        capacity = operator.index(max_length)
    except TypeError as error:
        raise PlanningError(
            f"max_length={max_length!r} is a {type(max_length).__name__}; give the tokens of a "
            "pack as an integer, such as 4096."
        ) from error
    if not 1 <= capacity < 2**53:
        raise PlanningError(f"max_length={capacity}; a pack holds at least 1 token, below 2**53.")
    return capacity


def classes_lower_bound(classes: LengthClasses, max_length: int, *, functions: int = 40) -> int:
    """Compute the bound of `lower_bound` from length classes.

    Args:
        classes: Lengths between 0 and `max_length`.
        max_length: Capacity of a pack in tokens.
        functions: How many dual feasible functions to try.
    """
    lengths, counts = classes.lengths[::-1], classes.counts[::-1]
    positive = lengths > 0
    lengths, counts = lengths[positive], counts[positive]
    if not len(lengths):
        return 0
    # Python integers: counts times lengths may pass 2**63 for absurd but legal inputs.
    if int(counts.sum()) * max_length < 2**62:
        best = -(-int((lengths * counts).sum()) // max_length)
        best = max(best, _martello_toth(lengths, counts, max_length))
    else:
        tokens = sum(a * b for a, b in zip(lengths.tolist(), counts.tolist(), strict=True))
        best = -(-tokens // max_length)
    for k in range(1, functions + 1):
        # u_k(x) = x where x (k + 1) is whole, floor(x (k + 1)) / k elsewhere, with x = length / L.
        whole, part = np.divmod(lengths * (k + 1), max_length)
        exact = part == 0
        at_whole = int((whole[exact] * counts[exact]).sum())
        between = int((whole * counts).sum()) - at_whole
        best = max(best, -(-(at_whole * k + between * (k + 1)) // (k * (k + 1))))
    return best


def _martello_toth(lengths: Int64Array, counts: Int64Array, max_length: int) -> int:
    """L2 over all thresholds: long pieces sit alone, and small ones must fit beside middle ones."""
    below = np.concatenate([[0], np.cumsum(counts)])
    tokens_below = np.concatenate([[0], np.cumsum(counts * lengths)])
    half = int(np.searchsorted(lengths, max_length // 2, side="right"))
    small = np.arange(half)
    if not half:
        return int(below[-1])
    big = np.searchsorted(lengths, max_length - lengths[small], side="right")
    alone = below[-1] - below[big]
    middle = below[big] - below[half]
    room = middle * max_length - (tokens_below[big] - tokens_below[half])
    short = tokens_below[half] - tokens_below[small]
    return int((alone + middle + np.maximum(0, -(-(short - room) // max_length))).max())
