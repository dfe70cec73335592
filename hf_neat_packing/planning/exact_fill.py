"""Packs closed exactly: the last room of a pack is taken by one length, or two, that just fit.

The lengths still to be placed are bits of one integer, so "is there a pair that sums to the room
left" is a shift and an AND over all lengths at once.
"""

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.bound import LengthClasses
from hf_neat_packing.planning.expansion import Runs

Pattern = dict[int, int]  # {length: documents of that length in the pack}


def exact_fill(classes: LengthClasses, max_length: int) -> Runs:
    """Place classes pack by pack: the longest first, the end of the pack closed exactly.

    A pack starts with the longest length left and goes on with the longest that fits. As soon as
    one length, or the most equal pair of lengths, closes it exactly, that ends it. The pattern is
    repeated while its lengths last, so there are about as many patterns as distinct lengths.

    Args:
        classes: Lengths of at least 1.
        max_length: Capacity of a pack in tokens.
    """
    left = dict(zip(classes.lengths.tolist(), classes.counts.tolist(), strict=True))
    shortest = int(classes.lengths[-1])
    present = _as_bits(classes.lengths, max_length)
    mirrored = _as_bits(max_length - classes.lengths, max_length)
    patterns: list[tuple[int, Pattern]] = []
    while present:
        pattern = _next_pattern(left, present, mirrored, shortest, max_length)
        times = min([left[length] // each for length, each in pattern.items()])
        for length, each in pattern.items():
            left[length] -= times * each
            if not left[length]:
                del left[length]
                present ^= 1 << length
                mirrored ^= 1 << (max_length - length)
        patterns.append((times, pattern))
    return _pattern_runs(patterns, classes)


def _next_pattern(
    left: dict[int, int], present: int, mirrored: int, shortest: int, max_length: int
) -> Pattern:
    length = present.bit_length() - 1
    pair_limit = 2 * length
    used: Pattern = {}
    taken = used.get
    room = max_length
    while True:
        each = min(room // length, left[length] - taken(length, 0))
        rest = room - each * length
        if each > 1 and 0 < rest < length:  # one fewer leaves a room that a pair can close
            each -= 1
            rest += length
        used[length] = taken(length, 0) + each
        room = rest
        if room < shortest:
            return used
        if left.get(room, 0) > taken(room, 0):
            used[room] = taken(room, 0) + 1
            return used
        if room <= pair_limit:
            pairs = present & (mirrored >> (max_length - room)) & ((2 << (room >> 1)) - 1)
            while pairs:
                short = pairs.bit_length() - 1
                long = room - short
                if left[short] > taken(short, 0) + (short == long) and left[long] > taken(long, 0):
                    used[short] = taken(short, 0) + 1
                    used[long] = taken(long, 0) + 1
                    return used
                pairs ^= 1 << short
        fitting = present & ((2 << room) - 1)
        length = fitting.bit_length() - 1
        while length > 0 and left[length] <= taken(length, 0):
            fitting ^= 1 << length
            length = fitting.bit_length() - 1
        if length <= 0:
            return used


def _as_bits(values: npt.NDArray[np.int64], highest: int) -> int:
    """Return the integer whose bit v is set for every v in `values`."""
    flags = np.zeros(highest + 1, dtype=np.uint8)
    flags[values] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _pattern_runs(patterns: list[tuple[int, Pattern]], classes: LengthClasses) -> Runs:
    """Number the packs of the patterns and list their placements by decreasing length."""
    first = (np.cumsum(classes.counts) - classes.counts).tolist()
    position = dict(zip(classes.lengths.tolist(), first, strict=True))
    rows: list[int] = []  # position in the order and a row of the table, end to end
    num_packs = 0
    for times, pattern in patterns:
        slot = 0
        for length, each in pattern.items():
            rows += (position[length], num_packs, times, each, slot)
            position[length] += times * each
            slot += each
        num_packs += times
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Runs(table[np.argsort(table[:, 0], kind="stable"), 1:], num_packs)
