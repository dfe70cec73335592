"""Best-fit decreasing over length classes, and an exact-fill pass where that is not tight.

Planning documents one by one costs a search for each. Documents of equal length are
interchangeable, and so are packs with equal room and history; both passes here move whole groups,
so their cost grows with the number of distinct lengths and not with the number of documents.
"""

from bisect import bisect_left, insort

import numpy as np

from hf_neat_packing.planning.bound import (
    Int64Array,
    LengthClasses,
    classes_lower_bound,
    length_classes,
)
from hf_neat_packing.planning.exact_fill import exact_fill
from hf_neat_packing.planning.expansion import Packs, Runs, expand
from hf_neat_packing.planning.policies import IntArray

# Bit operations on one integer of max_length bits for each class: past this the exact-fill pass
# would take longer than a second.
FILL_WORK_LIMIT = 2**33

Group = tuple[int, int, int]  # first pack, number of packs, documents in each


def plan_decreasing(lengths: IntArray, max_length: int, rng: np.random.Generator | None) -> Packs:
    """Pack pieces densely: best-fit decreasing, then exact fill if that leaves something to gain.

    Never more packs than best-fit decreasing over the single documents.

    Args:
        lengths: int32 or int64 `[pieces]`, 1 to `max_length` tokens.
        max_length: Capacity of a pack in tokens.
        rng: Shuffles the packs; None leaves them as they were opened.
    """
    if not len(lengths):
        empty = np.zeros(0, dtype=np.int32)
        return Packs(empty, empty, np.zeros(1, dtype=np.int64))
    classes = length_classes(lengths, max_length)
    runs = decreasing_runs(classes, max_length)
    return expand(runs, lengths, rng, longest=int(classes.lengths[0]))


def decreasing_runs(classes: LengthClasses, max_length: int) -> Runs:
    """Place classes of equal length; the better of the two passes."""
    runs = best_fit_decreasing(classes, max_length)
    bound = classes_lower_bound(classes, max_length, functions=6)
    if runs.num_packs <= bound + bound // 1000:
        return runs
    if len(classes.lengths) * max_length > FILL_WORK_LIMIT:
        return runs
    filled = exact_fill(classes, max_length)
    return filled if filled.num_packs < runs.num_packs else runs


def best_fit_decreasing(classes: LengthClasses, max_length: int) -> Runs:
    """Run best-fit decreasing over classes of equal length and groups of packs in one state.

    Exactly as many packs as over single documents: a class fills the tightest pack that takes one
    of its documents with as many as go in, then the next tightest, which is the order in which
    single documents would choose.

    Args:
        classes: Lengths of at least 1.
        max_length: Capacity of a pack in tokens.
    """
    shortest = int(classes.lengths[-1])
    table, groups = _one_a_pack(classes, max_length, shortest)
    rooms = list(groups)  # sorted
    num_packs = int(table[:, 1].sum())
    runs: list[int] = []  # rows of the table, end to end
    lengths, counts = (column[len(table) :].tolist() for column in classes)
    for length, count in zip(lengths, counts, strict=True):
        at = bisect_left(rooms, length)
        while count:
            if at < len(rooms):
                room = rooms[at]
                group = groups[room]
            else:
                room, group = max_length, [(num_packs, -(-count // (max_length // length)), 0)]
                num_packs += group[0][1]
            most = room // length
            while group and count:
                pack, packs, held = group.pop()
                each = most if count >= most else count
                full = count // each
                if full < packs:
                    group.append((pack + full, packs - full, held))
                else:
                    full = packs
                runs += (pack, full, each, held)
                count -= full * each
                left = room - each * length
                if left in groups:
                    groups[left].append((pack, full, held + each))
                elif left >= shortest:
                    groups[left] = [(pack, full, held + each)]
                    insort(rooms, left)
                    at += 1  # it is below `room`
            if not group and at < len(rooms):
                del groups[room], rooms[at]
    return Runs(np.concatenate([table, np.array(runs, dtype=np.int64).reshape(-1, 4)]), num_packs)


def _one_a_pack(
    classes: LengthClasses, max_length: int, shortest: int
) -> tuple[Int64Array, dict[int, list[Group]]]:
    """Open a pack for every document longer than half of one.

    Returns:
        Their rows of `Runs.table`, and the packs that have room for `shortest`, by room, ascending.
    """
    many = int(np.searchsorted(-classes.lengths, -(max_length // 2)))
    lengths, counts = classes.lengths[:many], classes.counts[:many]
    first = np.cumsum(counts) - counts
    table = np.stack([first, counts, np.ones_like(first), np.zeros_like(first)], axis=1)
    rooms = max_length - lengths
    useful = rooms >= shortest
    columns = (column[useful].tolist() for column in (rooms, first, counts))
    return table, {room: [(pack, packs, 1)] for room, pack, packs in zip(*columns, strict=True)}
