"""Flat packs of other tools are read once, and only if all that says where documents are agrees."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.dataset import nest_flat_packs
from hf_neat_packing.errors import BoundaryError, ColumnError


def flat(rows, **extra):
    """One row per pack of document lengths, with unique tokens, as TRL stores it."""
    tokens = iter(range(10_000))
    return {
        "input_ids": [[next(tokens) for _ in range(sum(row))] for row in rows],
        "seq_lengths": rows,
        "position_ids": [[p for n in row for p in range(n)] for row in rows],
        **extra,
    }


def nested(rows):
    tokens = iter(range(10_000))
    return [[[next(tokens) for _ in range(n)] for n in row] for row in rows]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    rows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    drop=st.sampled_from([None, "seq_lengths", "position_ids"]),
)
def test_each_form_gives_the_documents_back(rows, drop):
    columns = flat(rows)
    columns.pop(drop, None)
    read = nest_flat_packs(Dataset.from_dict(columns))
    assert read.column_names == ["input_ids"]
    assert read["input_ids"][:] == nested(rows)


def test_chunks_slices_and_shuffles_are_read():
    rows = [[2, 1], [3], [1, 1, 1], [4, 2]]
    dataset = Dataset.from_dict(flat(rows))
    joined = concatenate_datasets([dataset.select(range(1, 3)), dataset]).select([5, 0, 2])
    expected = [nested(rows)[3], nested(rows)[1], nested(rows)[0]]
    assert nest_flat_packs(joined)["input_ids"][:] == expected


def test_other_token_columns_are_nested_alike():
    dataset = Dataset.from_dict(flat([[2, 1]], labels=[[7, 8, 9]]))
    assert nest_flat_packs(dataset)[0]["labels"] == [[7, 8], [9]]


def test_the_packs_of_trl_are_read():
    trl = pytest.importorskip("trl")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 20, 50)]
    packed = trl.pack_dataset(Dataset.from_dict({"input_ids": documents}), 32)
    read = nest_flat_packs(packed)
    assert sorted(d for pack in read["input_ids"] for d in pack) == sorted(documents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [[1, 2], [3, 4, 5, 6]], "position_ids": None}, r"Row 1: .* 3, .* 4 tokens"),
        ({"seq_lengths": [[2], [2, 2]], "position_ids": None}, r"Row 1: .* 4, .* 3 tokens"),
        ({"seq_lengths": [[2], [1, 2]]}, r"Row 1, token 1: position_ids is 1, .* be 0"),
        ({"seq_lengths": [[2], [3, 0]], "position_ids": None}, "Row 1: seq_lengths holds 0"),
        ({"position_ids": [[0, 1], [0, 2, 0]], "seq_lengths": None}, "Row 1, token 1"),
        ({"position_ids": [[1, 2], [0, 1, 0]], "seq_lengths": None}, "Row 0, token 0"),
        ({"attention_mask": [[1, 1], [1, 1, 0]]}, "Row 1: attention_mask has zeros"),
    ],
)
def test_boundaries_that_disagree_are_refused_with_the_row(change, message):
    columns = {**flat([[2], [2, 1]]), **change}
    dataset = Dataset.from_dict({k: v for k, v in columns.items() if v is not None})
    with pytest.raises(BoundaryError, match=message):
        nest_flat_packs(dataset)


def test_rows_without_boundaries_or_with_values_of_unknown_documents_are_refused():
    with pytest.raises(ColumnError, match="do not say where documents begin"):
        nest_flat_packs(Dataset.from_dict({"input_ids": [[1, 2]]}))
    with pytest.raises(ColumnError, match=r"\['label'\]"):
        nest_flat_packs(Dataset.from_dict(flat([[2]], label=[1])))
    with pytest.raises(ColumnError, match="length 1 where 'input_ids' has length 2"):
        nest_flat_packs(Dataset.from_dict(flat([[2]], labels=[[1]])))
