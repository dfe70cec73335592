"""Overlong, short and empty documents: what is lost is what was asked for, and it is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import plan_packing

POLICIES = ("truncate", "split", "drop")


def packs_of(plan):
    """Tokens of the pieces of each pack, without regard to order."""
    packs = [[length for _, _, length in plan.pieces(pack)] for pack in range(len(plan))]
    return sorted(sorted(pack, reverse=True) for pack in packs)


@pytest.mark.parametrize("strategy", ["best_fit", "bfd", "sequential"])
@pytest.mark.parametrize("policy", POLICIES)
@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.integers(1, 30),
    st.integers(0, 8),
    st.sampled_from(["left", "right"]),
)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_tokens_are_conserved_by_every_policy(strategy, policy, lengths, capacity, minimum, side):
    plan = plan_packing(
        lengths,
        capacity,
        strategy=strategy,
        on_overlong=policy,
        min_length=minimum,
        truncate_side=side,
    )
    account = plan.accounting
    assert account.documents == plan.num_documents == len(lengths)
    assert account.tokens == sum(lengths)
    assert account.tokens_kept == plan.num_tokens
    assert account.documents_kept == len(set(plan.indices.tolist()))
    assert account.longest == max(lengths, default=0)
    assert (plan.pack_lengths <= capacity).all()
    kept = {}
    for pack in range(len(plan)):
        for document, start, length in plan.pieces(pack):
            kept.setdefault(document, []).append((start, start + length))
    for document, length in enumerate(lengths):
        spans = sorted(kept.get(document, []))
        if length == 0 or length < minimum or (policy == "drop" and length > capacity):
            assert spans == []
        elif policy == "truncate" and length > capacity:
            left = side == "left"
            assert spans == [(length - capacity, length) if left else (0, capacity)]
        else:
            assert [start for start, _ in spans] == list(range(0, length, capacity))
            assert [end for _, end in spans] == [*range(capacity, length, capacity), length]


def test_c38_truncate_cuts_two_of_seventeen_tokens():
    plan = plan_packing([7, 2, 4, 1, 3], 5, strategy="bfd", on_overlong="truncate")
    assert packs_of(plan) == [[3, 2], [4, 1], [5]]
    assert (plan.report.documents_cut, plan.report.tokens_cut, plan.report.tokens) == (1, 2, 17)
    assert plan.starts is None


def test_c38_truncate_on_the_left_keeps_the_last_tokens():
    plan = plan_packing(
        [7, 2], 5, strategy="sequential", on_overlong="truncate", truncate_side="left"
    )
    assert plan.pieces(0) == [(0, 2, 5)]


def test_c38_drop_leaves_out_one_document_of_seven_tokens():
    plan = plan_packing([7, 2, 4, 1, 3], 5, strategy="bfd", on_overlong="drop")
    assert packs_of(plan) == [[3, 2], [4, 1]]
    assert (plan.report.dropped_overlong, plan.report.tokens_dropped) == (1, 7)
    assert plan.report.documents_kept == 4


def test_c38_split_makes_pieces_that_lose_nothing():
    plan = plan_packing([7, 2, 4, 1, 3], 5, strategy="bfd", on_overlong="split")
    assert packs_of(plan) == [[2], [3, 2], [4, 1], [5]]
    assert sorted(zip(plan.indices, plan.starts, plan.lengths, strict=True))[:2] == [
        (0, 0, 5),
        (0, 5, 2),
    ]
    assert plan.report.documents_split == 1
    assert plan.report.tokens_kept == 17


def test_c38_an_overlong_document_is_an_error_unless_a_policy_was_chosen():
    with pytest.raises(PlanningError, match="document 0 has 7 tokens and max_length is 5") as info:
        plan_packing([7, 2, 4, 1, 3], 5)
    assert all(f'"{policy}"' in str(info.value) for policy in POLICIES)
    with pytest.raises(PlanningError, match="2 of 3 documents"):
        plan_packing([3, 7, 8], 5)


def test_c40_splitting_beside_empty_documents_keeps_every_piece_in_its_document():
    plan = plan_packing([7, 0, 3], 5, strategy="sequential", on_overlong="split")
    assert [plan.pieces(pack) for pack in range(len(plan))] == [
        [(0, 0, 5)],
        [(0, 5, 2), (2, 0, 3)],
    ]
    assert plan.report.dropped_empty == 1


@pytest.mark.parametrize("strategy", ["best_fit", "bfd", "sequential"])
def test_c21_a_document_of_no_tokens_is_dropped_and_counted(strategy):
    plan = plan_packing([3, 0, 4], 8, strategy=strategy)
    assert sorted(plan.indices.tolist()) == [0, 2]
    assert plan.report.dropped_empty == plan.report.documents_dropped == 1
    assert plan.report.documents_kept == 2


def test_c21_a_document_of_no_tokens_is_an_error_by_choice():
    with pytest.raises(PlanningError, match="document 1 is empty"):
        plan_packing([3, 0, 4], 8, on_empty="error")
    assert len(plan_packing([3, 4], 8, on_empty="error")) == 1


@pytest.mark.parametrize(("lengths", "capacity", "packs"), [([4, 4], 8, 1), ([1, 1], 1, 2)])
def test_c21_documents_that_end_where_the_pack_ends_leave_no_empty_segment(
    lengths, capacity, packs
):
    plan = plan_packing(lengths, capacity)
    assert len(plan) == packs
    assert (np.diff(plan.offsets) > 0).all()
    assert (plan.lengths > 0).all()


def test_short_documents_are_dropped_but_never_a_piece_of_a_split_one():
    plan = plan_packing([1, 6, 2, 3], 5, on_overlong="split", min_length=3)
    assert plan.report.dropped_short == 2
    assert sorted(plan.lengths.tolist()) == [1, 3, 5]


def test_a_split_into_more_pieces_than_a_plan_can_index_is_refused_before_it_is_made():
    with pytest.raises(PlanningError, match="4294967296 pieces"):
        plan_packing([2**32], 1, on_overlong="split")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sums_and_extremes_are_exact_over_many_documents(dtype):
    lengths = np.full(200_001, 30_000, dtype=dtype)
    lengths[[0, 70_000, -1]] = 50_000, 0, 60_000
    with pytest.raises(PlanningError, match=r"document 0 has 50000 tokens.*2 of 200001"):
        plan_packing(lengths, 40_000)
    account = plan_packing(lengths, 40_000, on_overlong="truncate").accounting
    assert (account.tokens, account.longest) == (199_998 * 30_000 + 110_000, 60_000)
    assert (account.dropped_empty, account.documents_cut, account.tokens_cut) == (1, 2, 30_000)
