"""The dense plan against best-fit decreasing over single documents, and the bound against the best."""

from bisect import bisect_left, insort
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import lower_bound, plan_packing

many_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=200)


def best_fit_decreasing(lengths, capacity):
    """Slow twin: each document into the tightest open pack that takes it."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


def fewest_packs(lengths, capacity):
    """Try everything."""

    @cache
    def fill(left):
        if not left:
            return 0
        best = len(left)

        def choose(at, room, rest):
            nonlocal best
            best = min(best, 1 + fill(rest))
            for i in range(at, len(rest)):
                if rest[i] <= room:
                    choose(i, room - rest[i], rest[:i] + rest[i + 1 :])

        choose(0, capacity - left[0], left[1:])
        return best

    return fill(tuple(sorted(lengths, reverse=True)))


@given(many_lengths, st.integers(40, 130))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_bfd_never_needs_more_packs_than_whole_set_best_fit_decreasing(lengths, capacity):
    assert len(plan_packing(lengths, capacity, strategy="bfd")) <= best_fit_decreasing(
        lengths, capacity
    )


@pytest.mark.parametrize("low", [1, 300, 1024])
@pytest.mark.parametrize("high", [1200, 2048, 4096])
def test_bfd_never_needs_more_packs_than_best_fit_decreasing_on_larger_sets(low, high):
    lengths = np.random.default_rng(low + high).integers(low, high + 1, 5000)
    plan = plan_packing(lengths, 4096, strategy="bfd")
    assert len(plan) <= best_fit_decreasing(lengths.tolist(), 4096)


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(12, 20))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_the_lower_bound_is_never_above_the_fewest_packs(lengths, capacity):
    fewest = fewest_packs(lengths, capacity)
    bound = lower_bound(lengths, capacity)
    assert -(-sum(lengths) // capacity) <= bound <= fewest
    for strategy in ("best_fit", "bfd", "sequential"):
        assert fewest <= len(plan_packing(lengths, capacity, strategy=strategy))


def test_the_lower_bound_sees_that_two_long_documents_never_share():
    assert lower_bound([6] * 10, 10) == 10
    assert lower_bound([6, 6, 6, 5], 10) == 4
    assert lower_bound([4] * 9, 11) == 5  # by tokens it would be 4


def test_the_lower_bound_refuses_documents_that_fit_nowhere():
    with pytest.raises(PlanningError, match="11 tokens"):
        lower_bound([3, 11], 10)
    assert lower_bound([], 10) == lower_bound([0, 0], 10) == 0


def triplets(num, capacity, rng):
    """Falkenauer: threes that fill a pack exactly, so the best plan has `num` packs."""
    first = rng.integers(capacity * 38 // 100, capacity * 49 // 100, num)
    second = (capacity - first) // 2 + rng.integers(-50, 50, num)
    return np.concatenate([first, second, capacity - first - second])


def test_exact_fill_comes_within_two_per_cent_on_triples_where_best_fit_decreasing_does_not():
    rng = np.random.default_rng(0)
    lengths = rng.permutation(triplets(5000, 4096, rng))
    plan = plan_packing(lengths, 4096, strategy="bfd")
    assert len(plan) <= 5000 * 1.02
    assert best_fit_decreasing(lengths.tolist(), 4096) > 5000 * 1.02


@pytest.mark.parametrize("capacity", [2048, 4096, 32_768])
@pytest.mark.parametrize("kind", ["chat", "instructions", "long", "uniform", "thirds"])
def test_bfd_is_within_a_thousandth_of_the_bound_on_realistic_lengths(kind, capacity):
    rng = np.random.default_rng(3)
    # Of uniform lengths the bound itself is loose by more than that on smaller sets.
    num, width = (100_000 if kind == "uniform" else 20_000), capacity // 24
    long = np.where(
        rng.random(num) < 0.7, rng.lognormal(6.4, 0.8, num), rng.lognormal(9.4, 0.7, num)
    )
    third = np.where(rng.random(num) < 0.5, capacity // 3 + 1, capacity // 4 + 1)
    drawn = {
        "chat": rng.lognormal(np.log(350), 1.0, num),
        "instructions": rng.lognormal(np.log(100), 0.6, num),
        "long": long,
        "uniform": rng.integers(1, capacity + 1, num),
        "thirds": third + rng.integers(0, width, num),
    }[kind]
    plan = plan_packing(np.clip(drawn, 8, capacity).astype(int), capacity, strategy="bfd")
    assert len(plan) <= plan.lower_bound * 1.001 + 1


@given(many_lengths, st.integers(40, 130))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_shuffling_the_packs_changes_their_order_and_nothing_else(lengths, capacity):
    def packs(seed):
        plan = plan_packing(lengths, capacity, strategy="bfd", seed=seed)
        return [plan.pieces(pack) for pack in range(len(plan))]

    assert sorted(packs(0)) == sorted(packs(None))
