"""Best-fit decreasing over length classes, and an exact-fill pass where that is not tight.

Planning documents one by one costs a search for each. Documents of equal length are
interchangeable, and so are packs with equal room and history; both passes here move whole groups,
so their cost grows with the number of distinct lengths and not with the number of documents.
"""

from bisect import bisect_left, insort
from itertools import chain

import numpy as np

from hf_neat_packing.planning.bound import LengthClasses, classes_lower_bound, length_classes
from hf_neat_packing.planning.exact_fill import exact_fill
from hf_neat_packing.planning.expansion import Packs, Runs, expand
from hf_neat_packing.planning.policies import IntArray

# Bit operations on one integer of max_length bits for each class: past this the exact-fill pass
# would take longer than a second.
FILL_WORK_LIMIT = 2**33

Group = tuple[int, int, int]  # first pack, number of packs, documents in each
Run = tuple[int, int, int, int]  # a row of `Runs.table`


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
    groups: dict[int, list[Group]] = {}  # by the room in their packs
    rooms: list[int] = []  # the keys of `groups`, sorted
    runs: list[Run] = []
    num_packs = 0
    shortest = int(classes.lengths[-1])
    for length, count in zip(classes.lengths.tolist(), classes.counts.tolist(), strict=True):
        changed: list[tuple[int, Group]] = []  # kept aside: too tight for this class, not the next
        at = bisect_left(rooms, length)
        while count and at < len(rooms):
            room = rooms[at]
            group = groups[room]
            count = _fill_group(group, room, length, count, runs, changed)
            if not group:
                del groups[room], rooms[at]
        if count:
            new: list[Group] = [(num_packs, -(-count // (max_length // length)), 0)]
            num_packs += new[0][1]
            _fill_group(new, max_length, length, count, runs, changed)
        for room, state in changed:
            if room >= shortest:
                known = groups.get(room)
                if known is None:
                    groups[room] = [state]
                    insort(rooms, room)
                else:
                    known.append(state)
    table = np.fromiter(chain.from_iterable(runs), dtype=np.int64, count=4 * len(runs))
    return Runs(table.reshape(-1, 4), num_packs)


def _fill_group(
    group: list[Group],
    room: int,
    length: int,
    count: int,
    runs: list[Run],
    changed: list[tuple[int, Group]],
) -> int:
    """Place up to `count` documents into packs with `room`; return how many are left."""
    each = room // length
    left = room - each * length
    while group:
        pack, packs, held = group.pop()
        if count >= each * packs:
            runs.append((pack, packs, each, held))
            changed.append((left, (pack, packs, held + each)))
            count -= each * packs
            if count:
                continue
            return 0
        full, rest = divmod(count, each)
        if full:
            runs.append((pack, full, each, held))
            changed.append((left, (pack, full, held + each)))
        if rest:
            runs.append((pack + full, 1, rest, held))
            changed.append((room - rest * length, (pack + full, 1, held + rest)))
            full += 1
        if full < packs:
            group.append((pack + full, packs - full, held))
        return 0
    return count
