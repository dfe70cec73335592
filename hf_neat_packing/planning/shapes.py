"""What a picture of packs shows, before anything is drawn: which packs, and the runs in each.

A picture has a finite width, so documents too short to be seen are drawn as one run and counted;
every token of a pack is in exactly one run.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

PALETTE: Final = ("#d3edc8", "#9bd8bb", "#58bfc0", "#2c9fc3", "#2774b2", "#254b9b", "#172468")
"""Colours of documents from short to long; a lightness ramp, so it reads without colour too.

Source: ColorBrewer YlGnBu, adjusted.
"""

PADDING: Final = "#e9e7e1"
"""Colour of the tail of a pack."""


class Run(NamedTuple):
    """A stretch of a pack that is drawn as one shape.

    Attributes:
        start: first token in the pack.
        length: tokens.
        documents: how many pieces of documents it stands for; 0 for padding.
        document: index of the document where it is one, else -1.
        is_part: whether it is a part of a document that was split.
        shade: index into `PALETTE`; 0 for padding.
    """

    start: int
    length: int
    documents: int
    document: int
    is_part: bool
    shade: int


def shade_of(length: int, capacity: int) -> int:
    """Index into `PALETTE` of a document: one step for every halving from a full pack.

    Args:
        length: tokens of the document, 1 or more.
        capacity: tokens of a full pack.
    """
    halvings = (capacity // length).bit_length() - 1
    return max(len(PALETTE) - 1 - halvings, 0)


def shade_ranges(capacity: int) -> list[tuple[int, int]]:
    """Shortest and longest document of each shade; the lowest begins at 1.

    Args:
        capacity: tokens of a full pack.

    Returns:
        One pair per shade that documents can have, from short to long.
    """
    by_shade: dict[int, tuple[int, int]] = {}
    longest = capacity
    for shade in reversed(range(len(PALETTE))):
        halvings = len(PALETTE) - 1 - shade
        shortest = 1 if shade == 0 else capacity // 2 ** (halvings + 1) + 1
        if shortest <= longest:
            by_shade[shade] = (shortest, longest)
            longest = shortest - 1
    return [by_shade[shade] for shade in sorted(by_shade)]


def runs_of(
    pieces: Sequence[tuple[int, int, int]],
    capacity: int,
    *,
    resolution: int,
    split: frozenset[int] = frozenset(),
) -> list[Run]:
    """Cut a pack into what is drawn.

    Args:
        pieces: `(document, start, length)` of each piece, as `PackingPlan.pieces` gives them.
        capacity: tokens of a full pack.
        resolution: how many documents of equal length a full pack may show apart.
        split: documents that became several pieces.

    Returns:
        Runs in order; shorter pieces beside each other are one run, and the tail is the last.
    """
    runs: list[Run] = []
    start = 0
    for is_short, group in groupby(pieces, lambda piece: piece[2] * resolution < capacity):
        members = list(group)
        for part in [members] if is_short and len(members) > 1 else [[m] for m in members]:
            length = sum(piece[2] for piece in part)
            only = part[0][0] if len(part) == 1 else -1
            shade = shade_of(max(piece[2] for piece in part), capacity)
            runs.append(Run(start, length, len(part), only, only in split, shade))
            start += length
    if start < capacity:
        runs.append(Run(start, capacity - start, 0, -1, False, 0))
    return runs


def chosen_packs(packs: int, most: int) -> list[int]:
    """Choose packs to show: all, or some at equal distances.

    Args:
        packs: packs of the plan.
        most: the most to choose.
    """
    if packs <= most:
        return list(range(packs))
    return [int(pack) for pack in np.linspace(0, packs - 1, most).round()]


def attention_share(lengths: Sequence[int], capacity: int) -> float:
    """Share of a full row's square that attention inside documents computes, 0 to 1.

    Args:
        lengths: tokens of each document in the pack.
        capacity: tokens of the row.
    """
    return sum(length**2 for length in lengths) / capacity**2
