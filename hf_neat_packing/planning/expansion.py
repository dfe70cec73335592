"""Turn a plan over classes of equal length into one over documents, vectorised."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.policies import IntArray

Int64Array = npt.NDArray[np.int64]


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


class Csr(NamedTuple):
    """Packs as rows of positions.

    Attributes:
        order: int32 or int64 `[pieces]`, positions of pieces, pack after pack.
        offsets: int64 `[packs + 1]`.
    """

    order: IntArray
    offsets: Int64Array


def decreasing_order(lengths: IntArray) -> Int64Array:
    """Sort positions by decreasing length, ties by position.

    Args:
        lengths: int32 or int64 `[pieces]`.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    if longest < 2**16:  # numpy sorts 16-bit keys by radix
        return np.argsort((longest - lengths).astype(np.uint16), kind="stable")
    return np.argsort(longest - lengths, kind="stable")


def expand(runs: Runs, order: IntArray, rng: np.random.Generator | None) -> Csr:
    """Write every piece of `order` into its pack.

    Args:
        runs: Placements that cover `order` from its first to its last piece.
        order: `[pieces]` positions by decreasing length.
        rng: Shuffles the packs; None leaves them as they were opened.
    """
    pack, packs, each, slot = _simple_runs(runs.table)
    num = len(order)
    sizes = packs * each
    first = np.cumsum(sizes) - sizes
    steps = np.zeros(runs.num_packs + 1, dtype=np.int64)
    np.add.at(steps, pack, each)
    np.subtract.at(steps, pack + packs, each)
    counts = np.cumsum(steps[:-1])
    shuffled = np.arange(runs.num_packs) if rng is None else rng.permutation(runs.num_packs)
    offsets = np.zeros(runs.num_packs + 1, dtype=np.int64)
    np.cumsum(counts[shuffled], out=offsets[1:])
    pack_start = np.empty(runs.num_packs, dtype=np.int64)
    pack_start[shuffled] = offsets[:-1]
    # In a run either the pack advances with the piece (packs > 1) or the slot does.
    across = packs > 1
    rank = np.arange(num, dtype=np.int32)
    along = np.repeat(across, sizes)
    destination_pack = np.repeat((pack - first * across).astype(np.int32), sizes)
    destination_pack += rank * along
    destination = pack_start[destination_pack]
    np.logical_not(along, out=along)
    rank *= along
    rank += np.repeat((slot - first * ~across).astype(np.int32), sizes)
    destination += rank
    placed = np.empty(num, dtype=np.int32)
    placed[destination] = order
    return Csr(placed, offsets)


def _simple_runs(table: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cut each block of `packs > 1` by `each > 1` into the fewer of its rows or columns."""
    pack, packs, each, slot = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
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


def shuffle_packs(packs: Csr, rng: np.random.Generator) -> Csr:
    """Put packs in random order; the pieces inside each stay as they are."""
    order, offsets = packs
    shuffled = rng.permutation(len(offsets) - 1)
    counts = np.diff(offsets)[shuffled]
    moved = np.zeros(len(offsets), dtype=np.int64)
    np.cumsum(counts, out=moved[1:])
    source = np.arange(len(order))
    source += np.repeat(offsets[shuffled] - moved[:-1], counts)
    return Csr(order[source], moved)
