"""Packs drafted and closed many at a time: nothing lost, never too full, and full to a thousandth."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.planning import best_fit, lower_bound, plan_packing
from hf_neat_packing.planning.best_fit import packs_of_window, plan_best_fit


@st.composite
def pieces(draw, least=0):
    capacity = draw(st.sampled_from([1, 3, 8, 60, 5000]))
    # Few distinct lengths and many: both have their own way of not adding up.
    longest = draw(st.sampled_from([capacity, max(1, capacity // 2), min(capacity, 3)]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=least, max_size=120))
    return np.array(lengths, dtype=np.int64), capacity


@given(pieces(), st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_rounds_of_drafts_place_every_piece_once_below_capacity_and_alike_each_time(drawn, seed):
    lengths, capacity = drawn
    with mock.patch.object(best_fit, "LAST_PIECES", 4):
        packs = plan_best_fit(lengths, capacity, np.random.default_rng(seed))
        again = plan_best_fit(lengths, capacity, np.random.default_rng(seed))
    assert sorted(packs.order.tolist()) == list(range(len(lengths)))
    assert packs.lengths.tolist() == lengths[packs.order].tolist()
    if len(lengths):
        assert np.add.reduceat(packs.lengths, packs.offsets[:-1]).max() <= capacity
        assert (np.diff(packs.offsets) > 0).all()
    assert all(map(np.array_equal, packs, again))


@given(pieces(least=1))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_window_gives_packs_apart_below_capacity_and_the_oldest_piece_is_in_one(drawn):
    lengths, capacity = drawn
    with mock.patch.object(best_fit, "SMALL_WINDOW", 4):
        packs = packs_of_window(lengths, capacity)
    taken = [piece for pack in packs for piece in pack]
    assert 0 in taken
    assert len(set(taken)) == len(taken)
    assert all(0 < lengths[pack].sum() <= capacity for pack in packs)


@pytest.mark.parametrize(("median", "sigma"), [(350, 1.0), (100, 0.6)])
@pytest.mark.parametrize("capacity", [2048, 4096, 32_768])
def test_all_packs_but_the_last_few_are_full_to_a_thousandth(median, sigma, capacity):
    rng = np.random.default_rng(2)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, 20_000), 8, capacity).astype(np.int64)
    plan = plan_packing(lengths, capacity)
    loose = (plan.pack_lengths < capacity - capacity // 1000).sum()
    assert loose <= 50
    assert len(plan) <= lower_bound(lengths, capacity) * 1.001 + 1


def test_long_pieces_find_the_short_ones_that_they_need():
    # Every length alike: one pack in two holds a piece of more than half, and short ones are scarce.
    lengths = np.random.default_rng(0).integers(1, 1001, 20_000)
    plan = plan_packing(lengths, 1000)
    assert len(plan) <= plan.lower_bound * 1.012

    def held_back(held, *_):
        return np.arange(len(held) // 2, len(held))[-3000:]

    with mock.patch.object(best_fit, "_held_back", held_back):
        assert len(plan_packing(lengths, 1000)) > plan.lower_bound * 1.04


@pytest.mark.parametrize("capacity", [2048, 4096, 32768])
def test_lengths_that_leave_room_in_any_plan_are_packed_to_the_bound(capacity):
    rng = np.random.default_rng(capacity)
    third = rng.integers(capacity // 3 + 1, capacity * 3 // 8, 15_000)
    quarter = rng.integers(capacity // 4 + 1, capacity * 7 // 24, 15_000)
    plan = plan_packing(rng.permutation(np.concatenate([third, quarter])), capacity)
    assert len(plan) <= plan.lower_bound + 1


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_uniform_lengths_need_few_packs_above_the_bound(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 20_000)
    plan = plan_packing(lengths, capacity)
    assert len(plan) <= 1.003 * plan.lower_bound
