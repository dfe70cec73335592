"""Documents regrouped into padded calls, and back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.hooks.regroup import (
    MAX_PADDING,
    cut_mask,
    equal_lengths,
    near_lengths,
    put,
    regroup,
    take,
)
from hf_neat_packing.hooks.running import RowLayout

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
CPU = torch.device("cpu")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=LENGTHS)
def test_groups_hold_every_document_once_and_keep_to_their_budget(lengths):
    groups = near_lengths(tuple(lengths), call_tokens=0)
    assert sorted(n for group in groups for n in group) == list(range(len(lengths)))
    padded = sum(max(lengths[n] for n in group) * len(group) for group in groups)
    assert padded <= (1 + MAX_PADDING) * sum(lengths)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=LENGTHS)
def test_equal_lengths_need_no_padding(lengths):
    groups = equal_lengths(tuple(lengths))
    assert all(len({lengths[n] for n in group}) == 1 for group in groups)
    assert sum(map(len, groups)) == len(lengths)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(rows=st.integers(1, 3), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_tokens_that_were_taken_apart_are_put_back_where_they_were(rows, lengths):
    layout = RowLayout(rows, sum(lengths), tuple(lengths) * rows)
    tokens = torch.randn(rows, sum(lengths), 5)
    for groups in (near_lengths, equal_lengths):
        plan = regroup(layout, groups, CPU)
        outputs = [take(tokens, call, layout) for call in plan.calls]
        assert torch.equal(put(outputs, plan), tokens)


def test_each_slot_of_a_call_holds_its_document_and_then_its_last_token():
    layout = RowLayout(1, 6, (2, 3, 1))
    plan = regroup(layout, near_lengths, CPU)
    (call,) = plan.calls
    ids = torch.tensor([[10, 11, 20, 21, 22, 30]])
    assert take(ids, call, layout).tolist() == [[10, 11, 11], [20, 21, 22], [30, 30, 30]]


def test_multi_axis_positions_and_tables_of_one_row_are_taken_too():
    layout = RowLayout(2, 3, (1, 2, 3))
    (call,) = regroup(layout, near_lengths, CPU).calls
    axes = torch.arange(18).reshape(3, 2, 3)
    assert take(axes, call, layout).shape == (3, 3, 3)
    assert take(axes, call, layout)[1, 2].tolist() == axes[1, 1].tolist()
    assert take(torch.randn(1, 3, 4), call, layout).shape == (3, 3, 4)


def test_a_cut_mask_hides_padding_from_every_real_token():
    layout = RowLayout(1, 5, (2, 3))
    (call,) = regroup(layout, near_lengths, CPU).calls
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    cut = cut_mask(mask, call, layout)
    assert cut[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    assert cut[1, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_padding_stays_below_15_percent_for_rows_of_long_tailed_lengths():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths, left = [], 4096
        while left > 0:
            drawn = int(torch.empty(1).log_normal_(5.0, 1.2, generator=generator)) + 1
            lengths.append(min(drawn, left))
            left -= lengths[-1]
        assert regroup(RowLayout(1, 4096, tuple(lengths)), near_lengths, CPU).padding < 0.15
