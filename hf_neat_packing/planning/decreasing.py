"""Best-fit decreasing over length classes, and an exact-fill pass where that is not tight.

Planning documents one by one costs a search for each. Documents of equal length are
interchangeable, and so are packs with equal room and history; both passes here move whole groups,
so their cost grows with the number of distinct lengths and not with the number of documents.
"""

from bisect import bisect_left, insort

import numpy as np

from hf_neat_packing.planning.bound import LengthClasses, classes_lower_bound, length_classes
from hf_neat_packing.planning.exact_fill import exact_fill
from hf_neat_packing.planning.expansion import Csr, Runs, decreasing_order, expand
from hf_neat_packing.planning.policies import IntArray

# Bit operations on one integer of max_length bits for each class: past this the exact-fill pass
# would take longer than a second.
FILL_WORK_LIMIT = 2**33


def plan_decreasing(lengths: IntArray, max_length: int, rng: np.random.Generator | None) -> Csr:
    """Pack pieces densely: best-fit decreasing, then exact fill if that leaves something to gain.

    Never more packs than best-fit decreasing over the single documents.

    Args:
        lengths: int32 or int64 `[pieces]`, 1 to `max_length` tokens.
        max_length: Capacity of a pack in tokens.
        rng: Shuffles the packs; None leaves them as they were opened.
    """
    if not len(lengths):
        return Csr(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    runs = decreasing_runs(length_classes(lengths), max_length)
    return expand(runs, decreasing_order(lengths), rng)


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
    groups: dict[int, list[tuple[int, int, int]]] = {}  # room: [(first pack, packs, documents)]
    rooms: list[int] = []
    runs: list[tuple[int, int, int, int]] = []
    place = runs.append
    num_packs = 0
    shortest = int(classes.lengths[-1])
    for length, count in zip(classes.lengths.tolist(), classes.counts.tolist(), strict=True):
        at = bisect_left(rooms, length)
        opened = []
        while count:
            if at < len(rooms):
                room = rooms[at]
                each = room // length
                group = groups[room]
                left = room - each * length
                while group and count:
                    pack, packs, held = group.pop()
                    full = min(count // each, packs)
                    if full:
                        place((pack, full, each, held))
                        count -= full * each
                        if left >= shortest:
                            opened.append((left, pack, full, held + each))
                        pack += full
                        packs -= full
                    if packs and count:
                        place((pack, 1, count, held))
                        if room - count * length >= shortest:
                            opened.append((room - count * length, pack, 1, held + count))
                        pack += 1
                        packs -= 1
                        count = 0
                    if packs:
                        group.append((pack, packs, held))
                if not group:
                    del groups[room]
                    rooms.pop(at)
                continue
            each = max_length // length
            full, rest = divmod(count, each)
            if full:
                place((num_packs, full, each, 0))
                if max_length - each * length >= shortest:
                    opened.append((max_length - each * length, num_packs, full, each))
                num_packs += full
            if rest:
                place((num_packs, 1, rest, 0))
                if max_length - rest * length >= shortest:
                    opened.append((max_length - rest * length, num_packs, 1, rest))
                num_packs += 1
            break
        for room, pack, packs, held in opened:
            known = groups.get(room)
            if known is None:
                groups[room] = [(pack, packs, held)]
                insort(rooms, room)
            else:
                known.append((pack, packs, held))
    return Runs(np.array(runs, dtype=np.int64).reshape(-1, 4), num_packs)
