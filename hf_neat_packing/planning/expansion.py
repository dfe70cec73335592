"""Turn a plan over classes of equal length into one over pieces, vectorised."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.policies import IntArray

Int64Array = npt.NDArray[np.int64]

# Pieces placed at a time, so that intermediate arrays stay in cache and out of the peak memory.
BLOCK = 2**15


class Runs(NamedTuple):
    """Placements of equal pieces, in order of decreasing length.

    Row i of `table` is `(pack, packs, each, slot)`: the next `packs * each` pieces of the order go
    to packs `pack .. pack + packs - 1`, `each` to every one, from position `slot` in it.

    Attributes:
        table: int64 `[runs, 4]`.
        num_packs: Packs in all.
    """

    table: Int64Array
    num_packs: int


class Packs(NamedTuple):
    """Pieces, pack after pack.

    Attributes:
        order: int32 `[pieces]`, position of each piece among those given.
        lengths: int32 or int64 `[pieces]`, its tokens.
        offsets: int64 `[packs + 1]`.
    """

    order: npt.NDArray[np.int32]
    lengths: IntArray
    offsets: Int64Array


def expand(
    runs: Runs, lengths: IntArray, rng: np.random.Generator | None, *, longest: int
) -> Packs:
    """Write every piece into its pack.

    Args:
        runs: Placements that cover the pieces from the longest to the shortest.
        lengths: int32 or int64 `[pieces]`, at least one, in order of arrival; pieces of equal
            length are placed in this order.
        rng: Shuffles the packs; None leaves them as they were opened.
        longest: The largest of `lengths`.
    """
    pack_start, offsets = _pack_starts(runs, rng)
    wide = longest >= 2**31
    keys = _ranked_keys(lengths) if wide else _keys(lengths, longest)
    keys.sort()
    placed = np.empty_like(keys)
    for start, stop, destination in _destinations(runs.table, pack_start):
        placed[destination] = keys[start:stop]
    del keys
    if wide:
        order = placed.astype(np.int32)  # the low half
        return Packs(order, lengths[order], offsets)
    order, held = _split_keys(placed, longest)
    return Packs(order, held, offsets)


def _keys(lengths: IntArray, longest: int) -> Int64Array:
    """Give pieces keys that sort by decreasing length, then position.

    The high 32 bits are what the length falls short of the longest, the low ones the position.
    Sorting such keys is much faster than an indirect sort, and brings the lengths along.
    """
    keys = np.empty(len(lengths), dtype=np.int64)
    for start in range(0, len(keys), BLOCK):
        part = keys[start : start + BLOCK]
        np.subtract(longest, lengths[start : start + BLOCK], out=part)
        part <<= 32
        part |= np.arange(start, start + len(part))
    return keys


def _ranked_keys(lengths: IntArray) -> Int64Array:
    """Do what `_keys` does for lengths that need more bits, with their rank."""
    distinct, rank = np.unique(lengths, return_inverse=True)
    return _keys(rank, len(distinct))


def _split_keys(keys: Int64Array, longest: int) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Take positions and lengths out of the keys of `_keys`."""
    order = np.empty(len(keys), dtype=np.int32)
    lengths = np.empty_like(order)
    for start in range(0, len(keys), BLOCK):
        part = keys[start : start + BLOCK]
        block = slice(start, start + len(part))
        order[block] = part  # the low half
        np.subtract(longest, part >> 32, out=lengths[block], casting="unsafe")
    return order, lengths


def _pack_starts(runs: Runs, rng: np.random.Generator | None) -> tuple[Int64Array, Int64Array]:
    """Count the pieces of each pack; return where each begins, and the offsets in final order."""
    pack, packs, each, _ = runs.table.T
    steps = np.zeros(runs.num_packs + 1, dtype=np.int64)
    np.add.at(steps, pack, each)
    np.subtract.at(steps, pack + packs, each)
    counts = np.cumsum(steps[:-1], out=steps[:-1])
    offsets = np.zeros(runs.num_packs + 1, dtype=np.int64)
    if rng is None:
        np.cumsum(counts, out=offsets[1:])
        return offsets[:-1], offsets
    shuffled = rng.permutation(runs.num_packs)
    np.cumsum(counts.take(shuffled), out=offsets[1:])
    starts = counts  # its memory, which is in cache
    starts[shuffled] = offsets[:-1]
    return starts, offsets


def _destinations(
    table: Int64Array, pack_start: Int64Array
) -> Iterator[tuple[int, int, Int64Array]]:
    """Yield blocks of pieces, first and last, and the place of each in the plan."""
    pack, packs, each, slot = _simple_runs(table)
    sizes = packs * each
    ends = np.cumsum(sizes)
    first = ends - sizes
    # In a run either the pack advances with the piece or the slot does. One lookup serves both:
    # behind the packs' starts the table simply counts.
    across = packs > 1
    count = np.arange(int(each[~across].max(initial=1)))
    lookup = np.concatenate([pack_start, count])
    entry = np.where(across, pack, len(pack_start)) - first
    base = np.where(across, slot, pack_start[pack] + slot)
    steps = np.arange(BLOCK, ends[-1] + BLOCK, BLOCK)
    last_run = np.unique(np.minimum(np.searchsorted(ends, steps) + 1, len(ends)))
    run, start = 0, 0
    for next_run in last_run.tolist():
        stop = int(ends[next_run - 1])
        repeats = sizes[run:next_run]
        at = np.repeat(entry[run:next_run], repeats)
        at += np.arange(start, stop)
        destination = lookup.take(at, mode="clip")  # never out of range; "clip" skips a buffer
        destination += np.repeat(base[run:next_run], repeats)
        yield start, stop, destination
        run, start = next_run, stop


def _simple_runs(table: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cut each block of `packs > 1` by `each > 1` into the fewer of its rows or columns."""
    pack, packs, each, slot = table.T
    block = (packs > 1) & (each > 1)
    if not block.any():
        return pack, packs, each, slot
    cuts = np.where(block, np.minimum(packs, each), 1)
    source = np.repeat(np.arange(len(packs)), cuts)
    part = np.arange(len(source)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    by_slot = (block & (each <= packs))[source]
    by_pack = (block & (each > packs))[source]
    pack, packs, each, slot = pack[source], packs[source], each[source], slot[source]
    each[by_slot] = 1
    slot[by_slot] += part[by_slot]
    packs[by_pack] = 1
    pack[by_pack] += part[by_pack]
    return pack, packs, each, slot


def shuffle_packs(packs: Packs, rng: np.random.Generator) -> Packs:
    """Put packs in random order; the pieces inside each stay as they are."""
    order, lengths, offsets = packs
    shuffled = rng.permutation(len(offsets) - 1)
    counts = np.diff(offsets)[shuffled]
    moved = np.zeros_like(offsets)
    np.cumsum(counts, out=moved[1:])
    source = np.arange(len(order), dtype=np.int32)
    source += np.repeat((offsets[shuffled] - moved[:-1]).astype(np.int32), counts)
    # `take` is twice as fast as an index in brackets.
    return Packs(order.take(source), lengths.take(source), moved)
