"""What every plan keeps: all documents once, capacity, order where promised, determinism."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import plan_packing

STRATEGIES = ("best_fit", "bfd", "sequential")
SEEDS = (None, 0, 7)

capacities = st.sampled_from([1, 2, 7, 64, 1000])


@st.composite
def documents(draw):
    capacity = draw(capacities)
    return draw(st.lists(st.integers(0, capacity), max_size=120)), capacity


def chat_lengths(num, capacity, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(350), 1.0, num), 8, capacity).astype(np.int64)


def assert_plan_holds(plan, lengths, capacity):
    lengths = np.asarray(lengths)
    assert sorted(plan.indices.tolist()) == np.flatnonzero(lengths).tolist()
    assert plan.lengths.tolist() == lengths[plan.indices].tolist()
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(plan.indices)
    assert (np.diff(plan.offsets) > 0).all()
    assert (plan.pack_lengths <= capacity).all()
    assert plan.pack_lengths.sum() == plan.num_tokens == lengths.sum()
    assert plan.lower_bound <= len(plan)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(documents(), st.sampled_from(SEEDS))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_document_is_in_one_pack_and_no_pack_is_above_capacity(strategy, drawn, seed):
    lengths, capacity = drawn
    plan = plan_packing(lengths, capacity, strategy=strategy, seed=seed)
    assert_plan_holds(plan, np.array(lengths, dtype=np.int64), capacity)


def test_the_check_itself_fails_on_a_plan_that_loses_a_document():
    plan = plan_packing([3, 4, 0], 8)
    with pytest.raises(AssertionError):
        assert_plan_holds(plan, [3, 4, 1], 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(documents(), st.sampled_from(SEEDS))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_the_same_arguments_give_the_same_plan(strategy, drawn, seed):
    lengths, capacity = drawn
    plan = plan_packing(lengths, capacity, strategy=strategy, seed=seed)
    assert plan == plan_packing(lengths, capacity, strategy=strategy, seed=seed)
    assert plan == pickle.loads(pickle.dumps(plan))


@given(documents())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_sequential_keeps_the_order_and_closes_a_pack_only_when_the_next_does_not_fit(drawn):
    lengths, capacity = drawn
    plan = plan_packing(lengths, capacity, strategy="sequential")
    assert plan.indices.tolist() == np.flatnonzero(lengths).tolist()
    following = plan.lengths[plan.offsets[1:-1]]
    assert (plan.pack_lengths[:-1] + following > capacity).all()


def test_sequential_crosses_the_blocks_of_its_search_unharmed():
    lengths = chat_lengths(200_000, 4096)
    plan = plan_packing(lengths, 4096, strategy="sequential")
    assert_plan_holds(plan, lengths, 4096)
    assert (plan.pack_lengths[:-1] + plan.lengths[plan.offsets[1:-1]] > 4096).all()


@given(documents())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_best_fit_without_a_seed_takes_the_oldest_document_into_each_pack_first(drawn):
    lengths, capacity = drawn
    lengths = [length for length in lengths if length]
    plan = plan_packing([*lengths, *[capacity] * 200], capacity, seed=None)
    placed = set()
    for pack in range(len(plan) - 150):  # the flush at the end plans what is left at once
        oldest = min(set(range(plan.num_documents)) - placed)
        held = [document for document, _, _ in plan.pieces(pack)]
        assert held[0] == oldest
        placed.update(held)


@pytest.mark.parametrize("strategy", ["best_fit", "bfd"])
def test_a_seed_leaves_no_trend_of_length_along_the_plan(strategy):
    lengths = np.sort(chat_lengths(20_000, 2048))
    plan = plan_packing(lengths, 2048, strategy=strategy, seed=0)
    longest = np.maximum.reduceat(plan.lengths, plan.offsets[:-1])
    trend = np.corrcoef(np.arange(len(plan)), longest)[0, 1]
    assert abs(trend) < 4 / np.sqrt(len(plan))  # four standard errors of no correlation
    ordered = plan_packing(lengths, 2048, strategy=strategy, seed=None)
    longest = np.maximum.reduceat(ordered.lengths, ordered.offsets[:-1])
    assert abs(np.corrcoef(np.arange(len(ordered)), longest)[0, 1]) > 0.5


def test_another_seed_gives_another_plan_of_as_many_tokens():
    lengths = chat_lengths(2000, 2048)
    for strategy in ("best_fit", "bfd"):
        one, two = (plan_packing(lengths, 2048, strategy=strategy, seed=seed) for seed in (0, 1))
        assert one != two
        assert one.num_tokens == two.num_tokens


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64, list, tuple])
def test_lengths_of_any_integer_form_give_one_plan(dtype):
    values = [5, 3, 3, 2, 2, 1, 4, 6]
    lengths = dtype(values) if dtype in (list, tuple) else np.array(values, dtype=dtype)
    assert plan_packing(lengths, 8) == plan_packing(np.array(values), 8)


def test_the_plan_does_not_change_when_the_lengths_do():
    for strategy in STRATEGIES:
        lengths = np.array([5, 3, 6, 2], dtype=np.int32)
        plan = plan_packing(lengths, 8, strategy=strategy)
        before = plan.lengths.tolist()
        lengths[:] = 1
        assert plan.lengths.tolist() == before
        with pytest.raises(ValueError, match="read-only"):
            plan.lengths[0] = 3


def test_pieces_lists_documents_from_either_end():
    plan = plan_packing([5, 3, 6, 2], 8, strategy="sequential")
    assert plan.pieces(0) == [(0, 0, 5), (1, 0, 3)]
    assert plan.pieces(-1) == plan.pieces(1) == [(2, 0, 6), (3, 0, 2)]
    for pack in (2, -3):
        with pytest.raises(IndexError):
            plan.pieces(pack)


def test_a_plan_says_in_one_line_what_it_is():
    plan = plan_packing([5, 3, 9, 2], 8, on_overlong="truncate")
    assert "4 documents -> 3 packs of 8 tokens" in repr(plan)
    assert "1 tokens lost" in repr(plan)
    assert "lost" not in repr(plan_packing([5, 3], 8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": [1.5], "max_length": 8}, "float64"),
        ({"lengths": [[1]], "max_length": 8}, "shape"),
        ({"lengths": [3, -1], "max_length": 8}, "document 1 has length -1"),
        ({"lengths": [3], "max_length": 0}, "max_length=0"),
        ({"lengths": [3], "max_length": True}, "True"),
        ({"lengths": [3], "max_length": 8.0}, "float"),
        ({"lengths": [3], "max_length": 8, "strategy": "ffd"}, "'best_fit', 'bfd', 'sequential'"),
        ({"lengths": [3], "max_length": 8, "on_overlong": "cut"}, "'truncate'"),
        ({"lengths": [3], "max_length": 8, "truncate_side": "both"}, "'left'"),
        ({"lengths": [3], "max_length": 8, "on_empty": "keep"}, "'drop'"),
        ({"lengths": [3], "max_length": 8, "seed": -1}, "seed=-1"),
        ({"lengths": [3], "max_length": 8, "seed": "a"}, "seed='a'"),
        ({"lengths": np.array([2**63], dtype=np.uint64), "max_length": 8}, "int64"),
    ],
)
def test_an_impossible_request_is_an_error_that_names_it(arguments, words):
    with pytest.raises(PlanningError, match=words):
        plan_packing(**arguments)


def test_c37_lengths_whose_sum_passes_two_to_the_31_stay_exact():
    big = 2**30
    for strategy in STRATEGIES:
        plan = plan_packing([big] * 3, 2**31, strategy=strategy)
        assert sorted(plan.pack_lengths.tolist()) == [big, 2 * big]
        assert plan.num_tokens == 3 * big
        assert plan.report.sum_squares == 3 * big**2
        alone = plan_packing(np.full(5, big, dtype=np.int32), big, strategy=strategy)
        assert alone.pack_lengths.tolist() == [big] * 5
    lengths = np.full(100_000, 40_000, dtype=np.int32)
    assert plan_packing(lengths, 40_000, strategy="bfd").num_tokens == 4_000_000_000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c37_documents_longer_than_any_int32_keep_their_lengths(strategy):
    lengths = [2**33 + 1, 5, 2**33, 5, 2**32]
    plan = plan_packing(lengths, 2**33 + 1, strategy=strategy)
    assert_plan_holds(plan, lengths, 2**33 + 1)
    assert plan.report.sum_squares == sum(length**2 for length in lengths)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("capacity", "packs"), [(8, 6), (9, 6), (16, 3), (17, 3)])
def test_c39_twelve_documents_of_four_fill_packs_of_any_capacity(strategy, capacity, packs):
    assert len(plan_packing([4] * 12, capacity, strategy=strategy)) == packs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c40_only_empty_documents_give_an_empty_plan(strategy):
    for lengths in ([0, 0], []):
        plan = plan_packing(lengths, 5, strategy=strategy)
        assert len(plan) == plan.num_tokens == plan.lower_bound == 0
        assert plan.fill == 0.0
        assert plan.indices.dtype == np.int32
        assert plan.offsets.tolist() == [0]
        assert plan.pack_lengths.tolist() == []
        assert plan.report.dropped_empty == len(lengths)


@pytest.mark.parametrize("strategy", ["best_fit", "bfd"])
def test_c42_small_sets_reach_the_lower_bound(strategy):
    plan = plan_packing([5, 3, 3, 2, 2, 1, 4, 6], 8, strategy=strategy)
    assert len(plan) == plan.lower_bound == 4


@pytest.mark.parametrize("strategy", ["best_fit", "bfd"])
def test_c42_two_hundred_thousand_documents_are_packed_tightly(strategy):
    lengths = chat_lengths(200_000, 4096)
    plan = plan_packing(lengths, 4096, strategy=strategy)
    assert_plan_holds(plan, lengths, 4096)
    assert len(plan) <= 1.001 * plan.lower_bound
    assert plan == plan_packing(lengths, 4096, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c44_a_set_smaller_than_one_pack_is_one_pack(strategy):
    plan = plan_packing([3], 64, strategy=strategy)
    assert [plan.pieces(pack) for pack in range(len(plan))] == [[(0, 0, 3)]]


def between_share(plan):
    logs = np.log(plan.lengths)
    means = np.add.reduceat(logs, plan.offsets[:-1]) / np.diff(plan.offsets)
    between = (np.diff(plan.offsets) * (means - logs.mean()) ** 2).sum()
    return between / ((logs - logs.mean()) ** 2).sum()


@pytest.mark.parametrize(("median", "sigma"), [(350, 1.0), (100, 0.6)])
@pytest.mark.parametrize("seed", [None, 0])
def test_best_fit_composes_packs_as_chance_does_and_bfd_does_not(median, sigma, seed):
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, 50_000), 8, 4096).astype(np.int64)
    plan = plan_packing(lengths, 4096, seed=seed)
    chance = (len(plan) - 1) / (len(lengths) - 1)
    assert abs(between_share(plan) - chance) < 0.1
    assert len(plan) <= plan.lower_bound * 1.001 + 1
    assert between_share(plan_packing(lengths, 4096, strategy="bfd")) > 0.5


def test_a_million_documents_are_planned_whole():
    lengths = chat_lengths(1_000_000, 4096)
    for strategy in STRATEGIES:
        plan = plan_packing(lengths, 4096, strategy=strategy)
        assert (np.bincount(plan.indices, minlength=len(lengths)) == 1).all()
        assert (plan.lengths == lengths[plan.indices]).all()
        assert plan.pack_lengths.max() <= 4096
        if strategy != "sequential":
            assert len(plan) <= plan.lower_bound * 1.001
