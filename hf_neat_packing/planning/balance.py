"""The cost of a pack, and an order of packs in which ranks wait little for one another."""

import operator

import numpy as np
import numpy.typing as npt

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning.policies import IntArray

Int64Array = npt.NDArray[np.int64]


def pack_costs(lengths: IntArray, offsets: Int64Array, *, hidden_size: int = 2048) -> Int64Array:
    """Compute the cost of every pack in tokens: its own, and what attention adds.

    A token and layer costs about `24 hidden_size**2` operations outside attention, and causal
    attention `2 * hidden_size` for each token of its document, so a document of n tokens costs as
    much as `n + n**2 / (12 hidden_size)` tokens without attention.

    Args:
        lengths: int `[pieces]`, tokens, pack after pack (`PackingPlan.lengths`).
        offsets: int64 `[packs + 1]`, no pack empty (`PackingPlan.offsets`).
        hidden_size: Width of the model.

    Returns:
        int64 `[packs]`, rounded to whole tokens.
    """
    if len(offsets) < 2:
        return np.zeros(0, dtype=np.int64)
    tokens = lengths.astype(np.float64)
    tokens += tokens * tokens / (12 * hidden_size)
    return np.rint(np.add.reduceat(tokens, offsets[:-1])).astype(np.int64)


def balanced_order(
    costs: npt.ArrayLike, num_ranks: int, *, steps_per_update: int = 1, seed: int | None = 0
) -> Int64Array:
    """Order packs so that the ranks of a step have packs of like cost.

    Packs are drawn into global batches of `num_ranks * steps_per_update` at random, and sorted by
    cost inside each: every update still sees a random draw of packs, and only who computes which
    changes. Every second step runs from the costliest down, so that the sums over an update are
    even too, for ranks that meet only there.

    Args:
        costs: `[packs]`, what each pack costs (`pack_costs`).
        num_ranks: Ranks that wait for one another.
        steps_per_update: Packs that each rank computes for one optimizer step.
        seed: Of the draw; None draws in the order given.

    Returns:
        int64 `[packs]`, a permutation: entry p is the pack of rank `p % num_ranks` in step
        `p // num_ranks`.

    Raises:
        PlanningError: costs are not one-dimensional, or a count is below 1.
    """
    values = np.asarray(costs)
    ranks, steps = operator.index(num_ranks), operator.index(steps_per_update)
    if values.ndim != 1 or ranks < 1 or steps < 1:
        raise PlanningError(
            f"costs of shape {values.shape}, num_ranks={num_ranks}, steps_per_update="
            f"{steps_per_update}; give one cost a pack, and at least 1 rank and 1 step."
        )
    num = len(values)
    drawn = np.arange(num) if seed is None else np.random.default_rng(seed).permutation(num)
    batch = np.arange(num) // (ranks * steps)
    order = drawn[np.lexsort((values[drawn], batch))]
    whole = num // ranks * ranks
    by_step = order[:whole].reshape(-1, ranks)
    by_step[1::2] = by_step[1::2, ::-1].copy()
    return order


def imbalance(costs: npt.ArrayLike, num_ranks: int) -> float:
    """Compute the share of time lost to the slowest rank of each step.

    Args:
        costs: `[packs]` in the order in which they are dealt, one to a rank and step; packs beyond
            the last full step are left out.
        num_ranks: Ranks that wait for one another.

    Returns:
        Sum over steps of the costliest pack, over the sum of the means, less 1; 0.0 for fewer
        packs than ranks.
    """
    values = np.asarray(costs, dtype=np.float64)
    steps = values[: len(values) // num_ranks * num_ranks].reshape(-1, num_ranks)
    mean = float(steps.mean(axis=1).sum())
    return float(steps.max(axis=1).sum()) / mean - 1 if mean else 0.0
