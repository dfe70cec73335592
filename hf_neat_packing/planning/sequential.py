"""Documents laid out in the order of arrival; a pack is closed when the next one does not fit."""

import numpy as np

from hf_neat_packing.planning.expansion import Int64Array
from hf_neat_packing.planning.policies import IntArray

BLOCK = 2**16


def sequential_offsets(lengths: IntArray, max_length: int) -> Int64Array:
    """Cut the stream of pieces into packs without changing its order.

    Args:
        lengths: int32 or int64 `[pieces]`, 1 to `max_length` tokens.
        max_length: Capacity of a pack in tokens.

    Returns:
        int64 `[packs + 1]`, the first piece of every pack, then the number of pieces.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = [0]
    piece, num = 0, len(lengths)
    while piece < num:
        # Where each pack would end, for a block of possible first pieces; then follow the chain.
        block = slice(piece, min(piece + BLOCK, num))
        before = ends[block] - lengths[block]
        next_pack = np.searchsorted(ends, before + max_length, side="right").tolist()
        base, stop = piece, block.stop
        while piece < stop:
            piece = next_pack[piece - base]
            offsets.append(piece)
    return np.array(offsets, dtype=np.int64)
