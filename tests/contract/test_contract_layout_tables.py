"""The two offset layouts of one document map, row by row, and what each refuses."""

import pytest
import torch

from hf_neat_packing.contract import varlen_kwargs_from_document_map
from hf_neat_packing.documents import get_seqlens_in_batch
from hf_neat_packing.errors import BoundaryError
from hf_neat_packing.metadata import (
    PackedSequenceMetadata,
    build_packed_sequence_metadata,
    flatten_packed_sequence_metadata,
)
from hf_neat_packing.offsets import full_stream_cu_seqlens, get_unpad_data

E1 = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]
E2 = [[1, 1, 1, 1], [1, 1, 2, 2]]
E3 = [[1, 1, 2, 0], [0, 0, 0, 0]]
E7 = [[0, 1, 1, 0, 2, 0]]
E8 = [[1, 1, 0, 0, 0, 0, 0, 0]]
PADDED = [[1, 1, 2, 0], [1, 1, 0, 0]]

FULL_STREAM = [
    (E1, [0, 2, 5, 6, 7, 9, 12], 3),
    (E2, [0, 4, 6, 8], 4),
    (E3, [0, 2, 3, 4, 8], 4),
    (E7, [0, 1, 3, 4, 5, 6], 2),
    (E8, [0, 2, 8], 6),
    (PADDED, [0, 2, 3, 4, 6, 8], 2),
]
BATCH_MAJOR = [
    (E1, [[0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5]], [[0, 2, 5, -1], [0, 1, 3, 6]], 3),
    (E2, [[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 4, -1], [0, 2, 4]], 4),
    (E3, [[0, 1, 2, -1], [-1, -1, -1, -1]], [[0, 2, 3], [0, -1, -1]], 2),
    (E7, [[-1, 1, 2, -1, 4, -1]], [[0, 2, 3]], 2),
    (E8, [[0, 1, -1, -1, -1, -1, -1, -1]], [[0, 2]], 2),
    (PADDED, [[0, 1, 2, -1], [0, 1, -1, -1]], [[0, 2, 3], [0, 2, -1]], 2),
]
FLAT = [
    (E1, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [0, 2, 5, 6, 8, 11]),
    (E2, list(range(8)), [0, 4, 6, 8]),
    (E3, [0, 1, 2], [0, 2, 3]),
    (E7, [1, 2, 4], [0, 2, 3]),
    (E8, [0, 1], [0, 2]),
    (PADDED, [0, 1, 2, 4, 5], [0, 2, 3, 5]),
]


def as_map(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(("rows", "offsets", "longest"), FULL_STREAM)
def test_full_stream_covers_padding_and_starts_a_segment_at_every_row(rows, offsets, longest):
    cu_seqlens, max_seqlen = full_stream_cu_seqlens(as_map(rows))
    assert cu_seqlens.tolist() == offsets
    assert cu_seqlens.dtype == torch.int32
    assert (type(max_seqlen), max_seqlen) == (int, longest)


@pytest.mark.parametrize(("rows", "offsets", "longest"), FULL_STREAM)
def test_the_four_varlen_kwargs_are_the_full_stream_with_plain_ints(rows, offsets, longest):
    kwargs = varlen_kwargs_from_document_map(as_map(rows))
    assert kwargs["cu_seq_lens_q"].tolist() == kwargs["cu_seq_lens_k"].tolist() == offsets
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == longest
    assert type(kwargs["max_length_q"]) is int


@pytest.mark.parametrize(("rows", "indices", "cu_seqlens", "longest"), BATCH_MAJOR)
def test_batch_major_bundle_is_row_local(rows, indices, cu_seqlens, longest):
    bundle = build_packed_sequence_metadata(as_map(rows))
    assert set(bundle) == set(PackedSequenceMetadata.__annotations__)
    assert bundle["packed_token_indices"].tolist() == indices
    assert bundle["packed_token_indices"].dtype == torch.int64
    assert bundle["cu_seqlens"].tolist() == cu_seqlens
    assert bundle["cu_seqlens"].dtype == torch.int32
    assert (type(bundle["max_seqlen"]), bundle["max_seqlen"]) == (int, longest)


@pytest.mark.parametrize(("rows", "indices", "offsets"), FLAT)
def test_flattening_the_bundle_gives_the_unpad_data(rows, indices, offsets):
    document_map = as_map(rows)
    bundle = build_packed_sequence_metadata(document_map)
    flat, cu_seqlens = flatten_packed_sequence_metadata(
        bundle["packed_token_indices"], bundle["cu_seqlens"], *document_map.shape
    )
    unpad_indices, unpad_cu_seqlens, _ = get_unpad_data(document_map)
    assert flat.tolist() == unpad_indices.tolist() == indices
    assert cu_seqlens.tolist() == unpad_cu_seqlens.tolist() == offsets


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_part_of_a_split_bundle_is_right_for_its_own_rows(chunks):
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    document_map = as_map(E1)
    bundle = build_packed_sequence_metadata(document_map)
    _, parts = split_args_kwargs_into_chunks((), {**bundle, "map": document_map}, chunks)
    for part in parts:
        flat, offsets = flatten_packed_sequence_metadata(
            part["packed_token_indices"], part["cu_seqlens"], *part["map"].shape
        )
        indices, cu_seqlens, _ = get_unpad_data(part["map"])
        assert flat.tolist() == indices.tolist()
        assert offsets.tolist() == cu_seqlens.tolist()
        assert part["max_seqlen"] == 3


def test_split_full_stream_offsets_are_wrong_which_is_why_the_entry_hook_rebuilds_them():
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    kwargs = varlen_kwargs_from_document_map(as_map(E1))
    _, parts = split_args_kwargs_into_chunks((), kwargs, 2)
    assert [part["cu_seq_lens_q"].tolist() for part in parts] == [[0, 2, 5, 6], [7, 9, 12]]


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [(E1, [2, 3, 1, 2, 3]), ([[1, 1, 1, 0, 0]], [3]), ([[1, 1, 3, 3]], [2, 2]), ([[0, 0]], [])],
)
def test_lengths_are_listed_in_the_order_of_the_rows(rows, lengths):
    assert get_seqlens_in_batch(as_map(rows)).tolist() == lengths


def test_lengths_follow_positions_and_not_ids():
    # By id the lengths would be [1, 2], of tokens that lie 2-then-1.
    assert get_seqlens_in_batch(as_map([[2, 2, 1]])).tolist() == [2, 1]
    assert get_unpad_data(as_map([[2, 2, 1]]))[1].tolist() == [0, 2, 3]


@pytest.mark.parametrize(("dtype", "length"), [(torch.int8, 200), (torch.uint8, 300)])
def test_lengths_do_not_wrap_in_narrow_maps(dtype, length):
    assert get_seqlens_in_batch(torch.ones(1, length, dtype=dtype)).tolist() == [length]


def test_a_binary_mask_is_one_document_per_row():
    indices, cu_seqlens, longest = get_unpad_data(
        torch.tensor([[True, True, False], [True, True, True]])
    )
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 3, 4, 5], [0, 2, 5], 3)


def test_the_bundle_is_as_wide_as_documents_are_many():
    bundle = build_packed_sequence_metadata(as_map([[1, 1, 1000, 1000]]))
    assert bundle["cu_seqlens"].tolist() == [[0, 2, 4]]


@pytest.mark.parametrize(
    "make", [get_unpad_data, build_packed_sequence_metadata, full_stream_cu_seqlens]
)
@pytest.mark.parametrize(
    ("document_map", "word"),
    [
        (torch.tensor([1, 2]), "shape"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "shape"),
        (torch.zeros(2, 0, dtype=torch.long), "token"),
        (torch.zeros(2, 3, dtype=torch.long), "padding"),
        (torch.tensor([[1, 2, 1]]), "comes back"),
        (torch.tensor([[1, -2, 2]]), "negative"),
        (torch.tensor([[1.0, 2.0]]), "integers"),
    ],
)
def test_maps_that_cannot_mean_documents_are_refused(make, document_map, word):
    with pytest.raises(BoundaryError, match=word):
        make(document_map)


@pytest.mark.parametrize(
    ("indices", "cu_seqlens", "flat", "offsets"),
    [
        ([[0, 1, 2, -1]], [[0, 1, 3]], [0, 1, 2], [0, 1, 3]),
        ([[0, 1, 2, -1], [0, 1, -1, -1]], [[0, 1, 3], [0, 2, -1]], [0, 1, 2, 4, 5], [0, 1, 3, 5]),
        ([[0, 1, 2, -1], [-1] * 4], [[0, 2, 3], [0, -1, -1]], [0, 1, 2], [0, 2, 3]),
        ([[0, 1]], [[0, 0, 2]], [0, 1], [0, 0, 2]),
        ([5, 7], [0, 2], [5, 7], [0, 2]),
    ],
)
def test_flattening_table(indices, cu_seqlens, flat, offsets):
    before = torch.tensor(indices), torch.tensor(cu_seqlens, dtype=torch.int32)
    copies = [value.clone() for value in before]
    rows, length = before[0].shape if before[0].ndim == 2 else (1, 8)
    got = flatten_packed_sequence_metadata(*before, batch_size=rows, sequence_length=length)
    assert (got[0].tolist(), got[1].tolist()) == (flat, offsets)
    assert (got[0].dtype, got[1].dtype) == (torch.int64, torch.int32)
    assert all(torch.equal(value, copy) for value, copy in zip(before, copies, strict=True))


def test_flat_offsets_pass_as_the_same_object():
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    got = flatten_packed_sequence_metadata(torch.tensor([5, 7]), cu_seqlens, 1, 8)
    assert got[1] is cu_seqlens


@pytest.mark.parametrize(
    ("indices", "cu_seqlens", "word"),
    [
        ([[-1] * 4], [[0, -1]], "all-padding"),
        ([[0, 1, 2, -1]], [[1, 3]], "start at 0"),
        ([[0, 1, 2, -1]], [[0, 2]], "ends at 2"),
        ([[0, 1, 2, -1]], [[0, 3, 2]], "falls"),
        ([[0, 1, 2, -1]], [[0, -1, 3]], "unused"),
        ([[0, 1, 2, -1]], [[-1, -1]], "start at 0"),
        ([[0, 1, -1, -1], [0, 1, -1, -1]], [[0, 3], [0, 1]], "Row 0"),
        ([[0, 1, 2, -1]], [0, 3], "shape"),
        ([0, 1, 2], [[0, 3]], "shape"),
        ([[0, 1, 2, -1]], [[], []], "rows"),
        ([[0, 1, 2, -1]], [[0, 3], [0, 3]], "rows"),
        ([[0, 1, 9, -1]], [[0, 3]], "next one"),
        ([5, 7], [0], "at least two"),
        ([5, 7], [0, 3], "end at"),
        ([5, 7], [1, 2], "start at 0"),
        ([5, 7], [0, 2, 1, 2], "never fall"),
        ([7, 5], [0, 2], "rise"),
        ([-5, 7], [0, 2], "non-negative"),
    ],
)
def test_flattening_refuses_rows_that_contradict_themselves(indices, cu_seqlens, word):
    shape = (len(indices), 4) if isinstance(indices[0], list) else (1, 8)
    with pytest.raises(BoundaryError, match=word):
        flatten_packed_sequence_metadata(
            torch.tensor(indices), torch.tensor(cu_seqlens, dtype=torch.int32), *shape
        )


def test_flattening_refuses_another_shape_than_the_microbatch():
    with pytest.raises(BoundaryError, match="microbatch of 2 rows"):
        flatten_packed_sequence_metadata(
            torch.tensor([[0, 1, -1]]), torch.tensor([[0, 2]]), batch_size=2, sequence_length=3
        )
