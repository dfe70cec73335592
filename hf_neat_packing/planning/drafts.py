"""Drafts of packs cut from an order of pieces, and the ends of all of them chosen at once.

A draft takes pieces in order while they fit. The room left in every draft is then looked up among
the pieces held back, for all drafts at once; where nothing fits to a thousandth, the last piece is
taken back and the larger room looked up. Nothing runs piece by piece.

Symbols: `M` pieces, `D` drafts, `C` packs closed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.expansion import Int64Array
from hf_neat_packing.planning.policies import IntArray

# Packs in a stretch of the order; stretches are cut side by side, and lose the end of the last pack.
STRETCH = 32
# How often the last piece of a draft that cannot be closed is taken back to try again.
TRIES = 3

_LOW = 2**32 - 1


class _Drafts(NamedTuple):
    """Packs that are open at the end.

    Attributes:
        first: int64 `[D]`, where each begins in the order it is cut from.
        stop: int64 `[D]`, one past its last piece.
        room: int64 `[D]`, tokens that still go in.
    """

    first: Int64Array
    stop: Int64Array
    room: Int64Array

    def take(self, chosen: npt.NDArray[np.bool_] | Int64Array) -> "_Drafts":
        """Choose drafts by index or by mask."""
        return _Drafts(self.first[chosen], self.stop[chosen], self.room[chosen])


class ClosedPacks(NamedTuple):
    """Packs that are full to a thousandth.

    Attributes:
        order: int64 `[pieces]`, pack after pack, as positions among the `M`.
        counts: int64 `[C]`, pieces of each pack.
        drafts: D, how many were tried.
    """

    order: Int64Array
    counts: Int64Array
    drafts: int


def close_drafts(lengths: IntArray, max_length: int, pool: Int64Array) -> ClosedPacks:
    """Draft packs from the pieces that are not held back, and close what can be closed.

    Args:
        lengths: int32 or int64 `[M]`, 1 to `max_length` tokens, in the order to draft from.
        max_length: Capacity of a pack in tokens, below 2**31.
        pool: int64, positions of the pieces held back; of pieces of one length the first is taken
            first.
    """
    near = max_length // 1000
    cut = np.ones(len(lengths), dtype=np.bool_)
    cut[pool] = False
    stream = np.flatnonzero(cut)
    drafts = _cut(np.cumsum(lengths[stream], dtype=np.int64), max_length)
    num_drafts = len(drafts.room)
    full = drafts.room <= near
    packs = [drafts.take(full)]
    closers = [np.full(len(packs[0].room), -1)]
    drafts = drafts.take(~full)
    for _ in range(TRIES):
        for width in (1, near // 2 + 1):
            draft, piece = _matches(drafts.room, lengths[pool], width)
            packs.append(drafts.take(draft))
            closers.append(pool[piece])
            drafts = drafts.take(_others(len(drafts.room), draft))
            pool = pool[_others(len(pool), piece)]
        last = stream[drafts.stop - 1]
        pool = np.concatenate([pool, last])
        drafts = drafts._replace(stop=drafts.stop - 1, room=drafts.room + lengths[last])
        drafts = drafts.take(drafts.stop > drafts.first)
    order, counts = _lay(stream, packs, np.concatenate(closers))
    return ClosedPacks(order, counts, num_drafts)


def _cut(ends: Int64Array, max_length: int) -> _Drafts:
    """Cut an order of pieces into drafts: each takes pieces until the next does not fit.

    Args:
        ends: int64, where each piece ends in tokens.
        max_length: Capacity of a pack in tokens.
    """
    stretches = max(1, int(ends[-1]) // max_length // STRETCH)
    limit = np.linspace(0, len(ends), stretches + 1).astype(np.int64)
    first, limit = limit[:-1], limit[1:]
    base = ends[first] - np.diff(ends, prepend=0)[first]
    parts = []
    while len(first):
        full = base + max_length
        stop = np.searchsorted(ends, full, side="right")
        within = stop < limit
        first, stop, limit, full = first[within], stop[within], limit[within], full[within]
        base = ends[stop - 1]
        parts.append(_Drafts(first, stop, full - base))
        first = stop
    return _Drafts(*map(np.concatenate, zip(*parts, strict=True)))


def _matches(rooms: Int64Array, lengths: IntArray, width: int) -> tuple[Int64Array, Int64Array]:
    """Find a piece for as many rooms as possible, each at most once.

    Args:
        rooms: int64 `[D]`, tokens.
        lengths: `[pieces]`, tokens.
        width: 1 for pieces that fill a room; more leaves up to `2 * width - 2` tokens free.

    Returns:
        Indices of the rooms, and of the piece for each.
    """
    wanted, room = _sorted(rooms // width)
    given, piece = _sorted(-(-lengths.astype(np.int64) // width))
    # The k-th room of a size gets the k-th piece of that size, if there are so many.
    at = np.searchsorted(given, wanted)
    at += np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
    found = np.flatnonzero(at < len(given))
    found = found[given[at[found]] == wanted[found]]
    return room[found], piece[at[found]]


def _sorted(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Sort values below 2**31; return them and where each was."""
    keys = values << 32
    keys |= np.arange(len(keys))
    keys.sort()
    return keys >> 32, keys & _LOW


def _others(num: int, chosen: Int64Array) -> npt.NDArray[np.bool_]:
    """Mark what was not chosen among `num`."""
    others = np.ones(num, dtype=np.bool_)
    others[chosen] = False
    return others


def _lay(
    stream: Int64Array, packs: list[_Drafts], closers: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """List the pieces of drafts, each followed by its closer where it has one (not -1)."""
    first, stop, _ = map(np.concatenate, zip(*packs, strict=True))
    has = closers >= 0
    counts = stop - first + has
    begins = np.cumsum(counts) - counts
    source = np.arange(int(counts.sum()))
    source += np.repeat(first - begins, counts)
    order = stream.take(source, mode="clip")  # out of range only where a closer comes
    order[(begins + counts - 1)[has]] = closers[has]
    return order, counts
