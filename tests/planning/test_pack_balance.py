"""The order of packs over ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import balanced_order, imbalance, pack_costs, plan_packing


@given(
    st.lists(st.integers(0, 10**6), max_size=200),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([None, 0, 3]),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_every_pack_appears_once_and_every_update_sees_the_packs_that_were_drawn(
    costs, ranks, steps, seed
):
    order = balanced_order(costs, ranks, steps_per_update=steps, seed=seed)
    assert sorted(order.tolist()) == list(range(len(costs)))
    drawn = np.arange(len(costs))
    if seed is not None:
        drawn = np.random.default_rng(seed).permutation(len(costs))
    size = ranks * steps
    for start in range(0, len(costs), size):
        window = slice(start, start + size)
        assert sorted(order[window].tolist()) == sorted(drawn[window].tolist())


def test_packs_of_one_step_have_neighbouring_costs():
    costs = np.array([9, 1, 5, 3, 7, 2, 8, 4])
    order = balanced_order(costs, 2, steps_per_update=4, seed=None)
    assert costs[order].reshape(-1, 2).tolist() == [[1, 2], [4, 3], [5, 7], [9, 8]]


def test_balanced_order_loses_at_most_a_third_of_the_time_of_random_order():
    rng = np.random.default_rng(0)
    for median, capacity in ((350, 4096), (350, 32_768), (3000, 32_768)):
        lengths = np.clip(rng.lognormal(np.log(median), 1.0, 200_000), 8, capacity).astype(int)
        plan = plan_packing(lengths, capacity)
        costs = pack_costs(plan.lengths, plan.offsets)
        drawn = costs[rng.permutation(len(costs))]
        balanced = costs[balanced_order(costs, 8, steps_per_update=8)]
        assert imbalance(balanced, 8) <= imbalance(drawn, 8) / 3


def test_the_cost_of_a_pack_is_its_tokens_and_what_attention_adds():
    plan = plan_packing([12, 24, 36], 36, strategy="sequential")
    costs = pack_costs(plan.lengths, plan.offsets, hidden_size=1)
    assert costs.tolist() == [12 + 12 + 24 + 48, 36 + 108]
    assert pack_costs(np.zeros(0, np.int32), np.zeros(1, np.int64)).tolist() == []


def test_imbalance_is_the_time_beyond_the_mean():
    assert imbalance([1, 3], 2) == 0.5
    assert imbalance([2, 2, 5, 5], 2) == 0.0
    assert imbalance([1], 2) == imbalance([], 2) == 0.0


def test_impossible_counts_are_refused():
    for ranks, steps, costs in ((0, 1, [1]), (1, 0, [1]), (1, 1, [[1]])):
        with pytest.raises(PlanningError, match="num_ranks"):
            balanced_order(costs, ranks, steps_per_update=steps)
