"""`plan_packing`: lengths in, `PackingPlan` out."""

import operator
from typing import Literal

import numpy as np

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning.best_fit import plan_best_fit
from hf_neat_packing.planning.bound import as_capacity
from hf_neat_packing.planning.decreasing import plan_decreasing
from hf_neat_packing.planning.expansion import Packs
from hf_neat_packing.planning.plan import PackingPlan
from hf_neat_packing.planning.policies import (
    IntArray,
    Lengths,
    OnEmpty,
    OnOverlong,
    TruncateSide,
    apply_policies,
    as_lengths,
    check_choice,
)
from hf_neat_packing.planning.pool import plan_pool
from hf_neat_packing.planning.sequential import sequential_offsets

Strategy = Literal["best_fit", "bfd", "sequential"]


def plan_packing(
    lengths: Lengths,
    max_length: int,
    *,
    strategy: Strategy = "best_fit",
    on_overlong: OnOverlong = "error",
    truncate_side: TruncateSide = "right",
    min_length: int = 0,
    on_empty: OnEmpty = "drop",
    seed: int | None = 0,
) -> PackingPlan:
    """Plan which documents share a pack.

    Args:
        lengths: Tokens of each document; any 1-D sequence of integers. int32 and int64 arrays are
            not copied.
        max_length: Capacity of a pack in tokens.
        strategy: How the documents are distributed:
            "best_fit" takes them in order and chooses only the end of each pack, from documents
            held back: packs have the mixture of lengths that chance gives;
            "bfd" (best-fit decreasing) needs the fewest packs and is the fastest to plan, but puts
            documents of like length together;
            "sequential" keeps the order of arrival and closes a pack when the next document does
            not fit.
        on_overlong: What becomes of documents longer than `max_length`: "error", "truncate" (cut to
            `max_length`), "split" (into pieces of `max_length` and a rest, each its own document
            in a pack), "drop". Everything but "error" is counted in the report.
        truncate_side: The side that "truncate" cuts: "right" keeps the first tokens.
        min_length: Documents with fewer tokens are dropped and counted. Pieces of a split document
            are never dropped.
        on_empty: Documents of no tokens are dropped and counted ("drop"), or are an "error".
        seed: Shuffles the documents before "best_fit", and the packs of "best_fit" and "bfd", so
            that the plan has no order of its own. None keeps the order of arrival ("best_fit") or
            of decreasing length ("bfd"), and lets "best_fit" look ahead no further than a thousand
            documents. "sequential" is never shuffled.

    Returns:
        The plan: every document once, but for what the policies left out. The same arguments give
        the same plan.

    Raises:
        PlanningError: the lengths, `max_length` or an option cannot be honoured.

    Example:
        >>> plan = plan_packing([5, 3, 6, 2], max_length=8, strategy="sequential")
        >>> [plan.pieces(pack) for pack in range(len(plan))]
        [[(0, 0, 5), (1, 0, 3)], [(2, 0, 6), (3, 0, 2)]]
    """
    check_choice("strategy", strategy, Strategy)
    check_choice("on_overlong", on_overlong, OnOverlong)
    check_choice("truncate_side", truncate_side, TruncateSide)
    check_choice("on_empty", on_empty, OnEmpty)
    capacity, seed = as_capacity(max_length), _as_seed(seed)
    array = as_lengths(lengths)
    pieces, accounting = apply_policies(
        array,
        capacity,
        on_overlong=on_overlong,
        truncate_side=truncate_side,
        min_length=min_length,
        on_empty=on_empty,
    )
    order, held, offsets = _distribute(pieces.lengths, capacity, strategy, seed)
    indices = order if pieces.documents is None else pieces.documents[order]
    return PackingPlan(
        indices=indices,
        offsets=offsets,
        lengths=held.astype(np.int32 if capacity < 2**31 else np.int64, copy=False),
        starts=None if pieces.starts is None else pieces.starts[order],
        max_length=capacity,
        strategy=strategy,
        seed=None if strategy == "sequential" else seed,
        num_documents=len(array),
        accounting=accounting,
    )


def _distribute(lengths: IntArray, max_length: int, strategy: Strategy, seed: int | None) -> Packs:
    rng = None if seed is None else np.random.default_rng(seed)
    if strategy == "sequential":
        in_order = np.arange(len(lengths), dtype=np.int32)
        return Packs(in_order, lengths.copy(), sequential_offsets(lengths, max_length))
    if strategy == "bfd":
        return plan_decreasing(lengths, max_length, rng)
    if rng is None:
        return plan_pool(lengths, max_length)
    return plan_best_fit(lengths, max_length, rng)


def _as_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    try:
        value = operator.index(seed)
    except TypeError as error:
        raise PlanningError(f"seed={seed!r}; give an integer of at least 0, or None.") from error
    if value < 0:
        raise PlanningError(f"seed={value}; give an integer of at least 0, or None.")
    return value
