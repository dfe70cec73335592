"""Drafts of packs cut from an order of pieces, and the ends of all of them chosen at once.

A draft takes pieces in order while they fit. The room left in every draft is then looked up among
the pieces held back, for all drafts at once; where nothing fits closely, the last piece is taken
back and the larger room looked up. Nothing runs piece by piece.

Symbols: `M` pieces, `D` drafts, `C` packs closed.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.expansion import Int64Array
from hf_neat_packing.planning.policies import IntArray

# Packs in a stretch of the order; stretches are cut side by side, and lose the end of the last pack.
STRETCH = 32
# With fewer stretches, drafts are cut one after another.
FEW_STRETCHES = 16
# How often the last piece of a draft that cannot be closed is taken back to try again.
TRIES = 3

Int32Array = npt.NDArray[np.int32]  # positions, halved: they are most of the memory


class _Drafts(NamedTuple):
    """Packs that are open at the end.

    Attributes:
        first: int32 `[D]`, where each begins in the order it is cut from.
        stop: int32 `[D]`, one past its last piece.
        room: int32 `[D]`, tokens that still go in.
    """

    first: Int32Array
    stop: Int32Array
    room: Int32Array

    def take(self, chosen: npt.NDArray[np.bool_] | Int32Array) -> "_Drafts":
        """Choose drafts by index or by mask."""
        return _Drafts(self.first[chosen], self.stop[chosen], self.room[chosen])


class ClosedPacks(NamedTuple):
    """Packs that are full but for a few tokens.

    Attributes:
        order: int32 `[pieces]`, pack after pack, as positions among the `M`.
        counts: int32 `[C]`, pieces of each pack.
        drafts: D, how many were tried.
    """

    order: Int32Array
    counts: Int32Array
    drafts: int


def close_drafts(lengths: IntArray, max_length: int, pool: Int32Array, *, near: int) -> ClosedPacks:
    """Draft packs from the pieces that are not held back, and close what can be closed.

    Args:
        lengths: int32 or int64 `[M]`, 1 to `max_length` tokens, in the order to draft from.
        max_length: Capacity of a pack in tokens, below 2**31.
        pool: int32, positions of the pieces held back; of pieces of one length the first is taken
            first.
        near: Tokens that a closed pack may leave free.
    """
    stream = np.flatnonzero(others(len(lengths), pool)).astype(np.int32)
    drafts = _cut(np.cumsum(lengths[stream], dtype=np.int64), max_length)
    num_drafts = len(drafts.room)
    full = drafts.room <= near
    packs = [drafts.take(full)]
    closers = [np.full(len(packs[0].room), -1, dtype=np.int32)]
    drafts = drafts.take(~full)
    for _ in range(TRIES):
        draft, piece = _matches(drafts.room, lengths[pool], near)
        packs.append(drafts.take(draft))
        closers.append(pool[piece])
        drafts = drafts.take(others(len(drafts.room), draft))
        last = stream[drafts.stop - 1]
        pool = np.concatenate([pool[others(len(pool), piece)], last])
        drafts = drafts._replace(stop=drafts.stop - 1, room=drafts.room + lengths[last])
        drafts = drafts.take(drafts.stop > drafts.first)
        if not len(drafts.room):
            break
    order, counts = _lay(stream, packs, np.concatenate(closers))
    return ClosedPacks(order, counts, num_drafts)


def _cut(ends: Int64Array, max_length: int) -> _Drafts:
    """Cut an order of pieces into drafts: each takes pieces until the next does not fit.

    Args:
        ends: int64, where each piece ends in tokens.
        max_length: Capacity of a pack in tokens.
    """
    stretches = int(ends[-1]) // max_length // STRETCH
    if stretches < FEW_STRETCHES:
        return _cut_in_turn(ends, max_length)
    limit = np.arange(stretches + 1) * len(ends) // stretches
    first, limit = limit[:-1], limit[1:]
    base = ends[first - 1]
    base[0] = 0
    parts = []
    while len(first):
        full = base + max_length
        stop = ends.searchsorted(full, side="right")
        within = stop < limit
        first, stop, limit, full = first[within], stop[within], limit[within], full[within]
        base = ends[stop - 1]
        parts.append(_drafts(first, stop, full - base))
        first = stop
    return _Drafts(*map(np.concatenate, zip(*parts, strict=True)))


def _cut_in_turn(ends: Int64Array, max_length: int) -> _Drafts:
    """Do what `_cut` does, one draft after another, which is quicker for few."""
    tokens = ends.tolist()
    bounds, base, stop = [0], 0, 0
    while (stop := bisect_right(tokens, base + max_length, lo=stop)) < len(tokens):
        bounds.append(stop)
        base = tokens[stop - 1]
    marks = np.array(bounds, dtype=np.int64)
    first, stops = marks[:-1], marks[1:]
    sums = ends[stops - 1]
    return _drafts(first, stops, max_length - np.diff(sums, prepend=0))


def _drafts(*columns: Int64Array) -> _Drafts:
    return _Drafts(*(column.astype(np.int32) for column in columns))


def _matches(rooms: IntArray, lengths: IntArray, near: int) -> tuple[Int32Array, Int32Array]:
    """Find a piece for many rooms, each at most once: the longest that fits, if it leaves little.

    Args:
        rooms: `[D]`, tokens.
        lengths: `[pieces]`, tokens.
        near: Tokens that may stay free.

    Returns:
        Indices of the rooms, and of the piece for each.
    """
    wanted, room = _sorted(rooms)
    # Of equal pieces the first comes last, and is taken first.
    given, piece = _sorted(lengths[::-1])
    piece = len(piece) - 1 - piece
    at = given.searchsorted(wanted, side="right") - 1
    # Rooms that ask for one piece take that and the next shorter ones.
    before = at.searchsorted(at)
    at -= np.arange(len(at), dtype=np.int32)
    at += before
    del before  # as long as the rooms, and so is what follows
    found = np.flatnonzero(at >= 0)
    at = at[found]
    owner = np.empty(len(given), dtype=np.int64)
    owner[at] = found
    good = (owner[at] == found) & (wanted[found] - given[at] <= near)
    return room[found[good]], piece[at[good]]


def _sorted(values: IntArray) -> tuple[Int64Array, Int32Array]:
    """Sort values below 2**31; return them and where each was."""
    keys = values.astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(keys), dtype=np.int32)
    keys.sort()
    position = keys.astype(np.int32)  # the low half
    keys >>= 32
    return keys, position


def others(num: int, chosen: Int32Array) -> npt.NDArray[np.bool_]:
    """Mark what was not chosen among `num`."""
    left = np.ones(num, dtype=np.bool_)
    left[chosen.astype(np.intp)] = False  # what it would be made anyhow, at once
    return left


def _lay(
    stream: Int32Array, packs: list[_Drafts], closers: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """List the pieces of drafts, each followed by its closer where it has one (not -1)."""
    first = np.concatenate([part.first for part in packs])
    stop = np.concatenate([part.stop for part in packs])
    has = closers >= 0
    counts = stop - first + has
    begins = np.cumsum(counts) - counts
    source = np.arange(int(counts.sum()), dtype=np.int32)
    source += np.repeat((first - begins).astype(np.int32), counts)
    order = stream.take(source, mode="clip")  # out of range only where a closer comes
    order[(begins + counts - 1)[has]] = closers[has]
    return order, counts
