"""Best fit with packs of chance composition: for a whole set in random order, and for a window of a stream.

Documents go into packs in their order, and only the end of each pack is chosen. In a random order
any piece held back is as good as a later one, so packs are drafted and closed many at a time
(`drafts`); what could not be closed is drawn again with the rest. A round leaves a small part of
the pieces, so all rounds cost little more than the first.
"""

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.bound import classes_lower_bound, length_classes
from hf_neat_packing.planning.drafts import Int32Array, close_drafts, others
from hf_neat_packing.planning.expansion import Int64Array, Packs, shuffle_packs
from hf_neat_packing.planning.policies import IntArray
from hf_neat_packing.planning.pool import PoolPacker, plan_pool

# So few pieces are packed one by one: a round would have too little to choose from.
LAST_PIECES = 500
# Share of the pieces that is held back to close packs with.
POOL_SHARE = 0.15
# Where most packs must hold a piece longer than half of them, shorter ones are scarce: from this
# share of packs on more of those are held back, up to all of them.
LONG_SHARE = 0.65
# A pack is closed when it leaves no more than one part in so many free.
CLOSE = 1000
# A round that closes less than this share of its drafts is the last, unless packs must leave more.
WORTHWHILE = 0.25
BOUND_FUNCTIONS = 6
# Pieces of a window that are packed one by one, and the share of a larger one that is held back: a
# window is small, and its packs must close in the first round.
SMALL_WINDOW = 64
WINDOW_SHARE = 0.4


def plan_best_fit(lengths: IntArray, max_length: int, rng: np.random.Generator) -> Packs:
    """Pack pieces in random order, the end of each pack chosen among other pieces.

    Args:
        lengths: int32 or int64 `[pieces]`, 1 to `max_length` tokens.
        max_length: Capacity of a pack in tokens.
        rng: Shuffles the pieces and the packs.
    """
    narrow = max_length < 2**31  # lengths share an integer with positions in `close_drafts`
    if narrow:
        lengths = lengths.astype(np.int32, copy=False)
    left: npt.NDArray[np.int32] = rng.permutation(len(lengths)).astype(np.int32)
    orders, counts = [], []
    near = max_length // CLOSE
    while len(left) > LAST_PIECES and narrow:
        held = lengths.take(left)
        # The pool is handed over, not kept: it is a good part of the memory.
        closed = close_drafts(held, max_length, _held_back(held, max_length, POOL_SHARE), near=near)
        orders.append(left.take(closed.order))
        counts.append(closed.counts)
        left = left[others(len(left), closed.order)]
        left = left.take(rng.permutation(len(left)))
        if len(closed.counts) <= WORTHWHILE * closed.drafts:
            # Lengths like these seldom add up to a pack: packs may leave what they must.
            near, before = _unavoidable(lengths[left], max_length), near
            if near <= before:
                break
    last = plan_pool(lengths[left], max_length)
    order = np.concatenate([*orders, left[last.order]])
    sizes = np.concatenate([*counts, np.diff(last.offsets)])
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return shuffle_packs(Packs(order, lengths.take(order), offsets), rng)


def packs_of_window(lengths: IntArray, max_length: int) -> list[list[int]]:
    """Choose some packs among the pieces held of a stream; the oldest piece is in one of them.

    What is chosen depends on nothing but the lengths.

    Args:
        lengths: int64 `[pieces]`, at least one, 1 to `max_length` tokens, in order of arrival.
        max_length: Capacity of a pack in tokens.

    Returns:
        At least one pack, each as positions among the pieces.
    """
    if len(lengths) <= SMALL_WINDOW or max_length >= 2**31:
        return _one_by_one(np.arange(len(lengths)), lengths, max_length, 1)
    pool = _held_back(lengths, max_length, WINDOW_SHARE)
    closed = close_drafts(lengths, max_length, pool, near=max_length // CLOSE)
    order, bounds = closed.order.tolist(), accumulate(closed.counts.tolist(), initial=0)
    packs = [order[start:stop] for start, stop in pairwise(bounds)]
    free = others(len(lengths), closed.order)
    if len(packs) < WORTHWHILE * closed.drafts:
        # Lengths like these seldom add up to a pack: the best that there is, for as many.
        packs += _one_by_one(np.flatnonzero(free), lengths, max_length, closed.drafts - len(packs))
    elif free[0]:
        packs.append(_oldest(np.flatnonzero(free), lengths, max_length))
    return packs


def last_packs(lengths: IntArray, max_length: int) -> list[list[int]]:
    """Choose packs for all pieces that are held when a stream has ended.

    Args:
        lengths: int64 `[pieces]`, 1 to `max_length` tokens, in order of arrival.
        max_length: Capacity of a pack in tokens.

    Returns:
        Packs as positions among the pieces, each in one of them.
    """
    packs = plan_pool(lengths, max_length)
    order = packs.order.tolist()
    return [order[start:stop] for start, stop in pairwise(packs.offsets.tolist())]


def _held_back(lengths: IntArray, max_length: int, share: float) -> Int32Array:
    """Choose the pieces to close packs with: the last in the order that are at most half a pack."""
    short = np.flatnonzero(lengths <= max_length // 2).astype(np.int32)
    packs = int(lengths.sum(dtype=np.int64)) / max_length
    scarce = ((len(lengths) - len(short)) / packs - LONG_SHARE) / (1 - LONG_SHARE)
    held = max(int(share * len(lengths)), int(min(1.0, scarce) * len(short)))
    return short[max(0, len(short) - held) :]


def _unavoidable(lengths: IntArray, max_length: int) -> int:
    """Compute how many tokens packs of these pieces leave free on average, in any plan.

    By the lower bound, taken one lower, as the last pack of a plan may be of any size.
    """
    classes = length_classes(lengths, max_length)
    packs = classes_lower_bound(classes, max_length, functions=BOUND_FUNCTIONS) - 1
    return max_length - int(lengths.sum(dtype=np.int64)) // packs if packs > 0 else 0


def _one_by_one(
    pieces: Int64Array, lengths: IntArray, max_length: int, packs: int
) -> list[list[int]]:
    """Choose up to `packs` packs among `pieces` (positions) with a `PoolPacker`."""
    packer = PoolPacker(max_length)
    for piece, length in zip(pieces.tolist(), lengths[pieces].tolist(), strict=True):
        packer.push(piece, length)
    chosen: list[list[int]] = []
    while len(packer) and len(chosen) < packs:
        chosen.append(packer.pop())
    return chosen


def _oldest(pieces: Int64Array, lengths: IntArray, max_length: int) -> list[int]:
    """Fill one pack from the oldest of `pieces` on, then with the longest that still fit."""
    held = lengths[pieces]
    taken = int(np.searchsorted(np.cumsum(held), max_length, side="right"))
    pack: list[int] = pieces[:taken].tolist()
    room = max_length - int(held[:taken].sum())
    pieces, held = pieces[taken:], held[taken:].copy()
    while (fits := held <= room).any():
        longest = int(np.argmax(held * fits))
        pack.append(int(pieces[longest]))
        room -= int(held[longest])
        held[longest] = max_length + 1
    return pack
