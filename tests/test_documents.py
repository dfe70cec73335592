"""Properties of the document map: its forms are one another's inverses, and bad maps are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.documents import get_seqlens_in_batch, lengths_to_document_map
from hf_neat_packing.errors import BoundaryError
from hf_neat_packing.metadata import (
    build_packed_sequence_metadata,
    flatten_packed_sequence_metadata,
)
from hf_neat_packing.offsets import (
    document_map_from_cu_seqlens,
    full_stream_cu_seqlens,
    get_unpad_data,
    lengths_to_cu_seqlens,
)
from hf_neat_packing.positions import (
    document_map_from_position_ids,
    position_ids_from_document_map,
    seq_idx_from_document_map,
)

ROWS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=4)
GENTLE = settings(deadline=None, derandomize=True, max_examples=80)


def make_map(rows, tail=0):
    return lengths_to_document_map(rows, row_length=max(map(sum, rows)) + tail)


@GENTLE
@given(ROWS, st.integers(0, 3))
def test_lengths_go_round(rows, tail):
    ids = make_map(rows, tail)
    flat = [n for row in rows for n in row]
    assert get_seqlens_in_batch(ids).tolist() == flat
    indices, offsets, longest = get_unpad_data(ids)
    assert offsets.diff().tolist() == flat
    assert longest == max(flat)
    assert torch.equal(indices, ids.reshape(-1).nonzero().squeeze(1))
    assert offsets.dtype == torch.int32


@GENTLE
@given(ROWS, st.integers(0, 3))
def test_full_stream_offsets_go_round(rows, tail):
    ids = make_map(rows, tail)
    offsets, longest = full_stream_cu_seqlens(ids)
    assert int(offsets[-1]) == ids.numel()
    assert longest == int(offsets.diff().max())
    back = document_map_from_cu_seqlens(offsets, batch_size=ids.shape[0], row_length=ids.shape[1])
    assert torch.equal(full_stream_cu_seqlens(back)[0], offsets)
    real = ids != 0
    assert torch.equal(back[real], ids[real])


@GENTLE
@given(ROWS, st.integers(0, 3))
def test_the_bundle_goes_round_whole_and_split(rows, tail):
    ids = make_map(rows, tail)
    bundle = build_packed_sequence_metadata(ids)
    indices, offsets = flatten_packed_sequence_metadata(
        bundle["packed_token_indices"], bundle["cu_seqlens"], *ids.shape
    )
    expected = get_unpad_data(ids)
    assert torch.equal(indices, expected[0])
    assert torch.equal(offsets, expected[1])
    for row in range(ids.shape[0]):
        part = flatten_packed_sequence_metadata(
            bundle["packed_token_indices"][row : row + 1],
            bundle["cu_seqlens"][row : row + 1],
            1,
            ids.shape[1],
        )
        alone = get_unpad_data(ids[row : row + 1])
        assert torch.equal(part[0], alone[0])
        assert torch.equal(part[1], alone[1])


@GENTLE
@given(ROWS, st.integers(0, 5))
def test_positions_restart_and_tell_the_documents(rows, start):
    ids = make_map(rows)
    positions = position_ids_from_document_map(ids, start=start)
    flat = [p for row in rows for n in row for p in range(start, start + n)]
    assert positions[ids != 0].tolist() == flat
    for row, lengths in enumerate(rows):
        one = document_map_from_position_ids(positions[row : row + 1, : sum(lengths)])
        assert get_seqlens_in_batch(one).tolist() == lengths


@GENTLE
@given(ROWS, st.integers(0, 3))
def test_seq_idx_changes_exactly_at_segment_starts(rows, tail):
    ids = make_map(rows, tail)
    index = seq_idx_from_document_map(ids)
    assert index.dtype == torch.int32
    assert (index[:, 0] == 0).all()
    assert torch.equal(index[:, 1:] != index[:, :-1], ids[:, 1:] != ids[:, :-1])


def test_c13_three_rows_of_positions_are_not_three_rows_of_a_batch():
    for axes in (3, 4):
        one = torch.arange(10).expand(axes, 1, 10)
        assert full_stream_cu_seqlens(document_map_from_position_ids(one))[0].tolist() == [0, 10]
        two = torch.cat([torch.arange(4), torch.arange(6)]).expand(axes, 1, 10)
        assert full_stream_cu_seqlens(document_map_from_position_ids(two))[0].tolist() == [0, 4, 10]


def test_c14_an_image_does_not_start_a_document():
    axes = torch.tensor(
        [
            [0, 1, 2, 3, 3, 3, 3, 5, 6, 0, 1, 2, 3],
            [0, 1, 2, 3, 3, 4, 4, 5, 6, 0, 1, 2, 3],
            [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 2, 3],
        ]
    )[:, None]
    assert full_stream_cu_seqlens(document_map_from_position_ids(axes))[0].tolist() == [0, 9, 13]


def test_an_image_at_the_start_of_a_document_is_one_document():
    axes = torch.tensor(
        [[0, 0, 0, 0, 2, 3, 0, 1], [0, 0, 1, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 0, 1]]
    )
    found = document_map_from_position_ids(axes[:, None])
    assert found.tolist() == [[1, 1, 1, 1, 1, 1, 2, 2]]


def test_c17_positions_that_never_hold_the_start_value():
    one = document_map_from_position_ids(torch.tensor([[7, 8, 9, 10]]))
    offsets, longest = full_stream_cu_seqlens(one)
    assert (offsets.tolist(), longest) == ([0, 4], 4)
    two = document_map_from_position_ids(torch.tensor([[3, 4, 5, 0, 1]]))
    offsets, longest = full_stream_cu_seqlens(two)
    assert (offsets.tolist(), longest) == ([0, 3, 5], 3)


def test_c19_one_dimensional_positions():
    found = document_map_from_position_ids(torch.tensor([0, 1, 2, 0, 1]))
    assert full_stream_cu_seqlens(found)[0].tolist() == [0, 3, 5]
    with pytest.raises(BoundaryError, match="position_ids"):
        document_map_from_position_ids(torch.tensor([0, 1, 2, 0, 1]), batch_size=2)


def test_one_token_documents_are_documents():
    found = document_map_from_position_ids(torch.tensor([[0, 0, 0, 1, 0]]))
    assert get_seqlens_in_batch(found).tolist() == [1, 1, 2, 1]


def test_c20_a_padding_tail_is_one_segment_and_no_document():
    for lengths, offsets in (([3, 2], [0, 3, 5, 8]), ([5], [0, 5, 8]), ([4, 4], [0, 4, 8])):
        ids = lengths_to_document_map([lengths], row_length=8)
        assert get_seqlens_in_batch(ids).tolist() == lengths
        assert full_stream_cu_seqlens(ids)[0].tolist() == offsets


def test_c21_empty_documents_leave_no_repeated_offset():
    assert lengths_to_cu_seqlens([3, 0, 4])[0].tolist() == [0, 3, 7]
    assert lengths_to_cu_seqlens([4, 4])[0].tolist() == [0, 4, 8]
    assert lengths_to_cu_seqlens([1, 1])[0].tolist() == [0, 1, 2]
    for bad in ([], [0, 0], [3, -1]):
        with pytest.raises(BoundaryError):
            lengths_to_cu_seqlens(bad)


def test_c37_offsets_past_int32_are_refused():
    with pytest.raises(BoundaryError, match=r"3221225472.*int32"):
        lengths_to_cu_seqlens([2**30] * 3)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([[1, 2, 1]], "comes back"),
        ([[1, -2, 1]], "-2"),
        ([[0, 0, 0]], "no real token"),
        ([1, 1, 2], "shape"),
        ([[1.0, 2.0]], "integers"),
    ],
)
def test_maps_that_lie_are_refused(bad, words):
    with pytest.raises(BoundaryError, match=words):
        get_unpad_data(torch.tensor(bad))


def test_a_document_interrupted_by_padding_is_one_document_only_where_padding_is_gathered_away():
    ids = torch.tensor([[1, 1, 0, 1, 2]])
    assert get_seqlens_in_batch(ids).tolist() == [3, 1]
    assert position_ids_from_document_map(ids)[0].tolist() == [0, 1, 0, 2, 0]
    with pytest.raises(BoundaryError, match="full stream"):
        full_stream_cu_seqlens(ids)


def test_offsets_that_cross_a_row_are_refused():
    with pytest.raises(BoundaryError, match="start of row 1"):
        document_map_from_cu_seqlens(torch.tensor([0, 3, 8]), batch_size=2, row_length=4)


def test_inputs_are_not_changed():
    ids = torch.tensor([[1, 1, 2, 0]], dtype=torch.uint8)
    before = ids.clone()
    for function in (get_unpad_data, full_stream_cu_seqlens, build_packed_sequence_metadata):
        function(ids)
    assert torch.equal(ids, before)
