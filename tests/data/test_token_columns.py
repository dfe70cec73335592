"""Token columns laid end to end: forms, dtypes, and what is refused by name."""

import numpy as np
import pytest
import torch

from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.errors import ColumnError
from hf_neat_packing.token_columns import join_token_columns

TOKEN = {"ids": ColumnRule("token")}


def join(*values):
    return join_token_columns({"ids": list(values)}, TOKEN)


@pytest.mark.parametrize(
    "values",
    [
        ([1, 2], [3]),
        ([1, 2], (3,)),
        ([1, 2], np.array([3])),
        ((1, 2), [3]),
        (np.array([1, 2]), np.array([3])),
        (np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.uint8)),
        (np.array([1, 2]), torch.tensor([3])),
        (np.array([1, 9, 2])[::2], np.array([3])),
        (torch.tensor([1, 2]), torch.tensor([3])),
        (torch.tensor([1, 9, 2])[::2], torch.tensor([3], dtype=torch.int16)),
        (torch.tensor([1, 2]), np.array([3])),
        (torch.tensor([1, 2]), [3]),
    ],
)
def test_whole_numbers_of_every_form_become_one_int64_array(values):
    flat, sizes = join(*values)
    assert flat["ids"].dtype == np.int64
    assert flat["ids"].tolist() == [1, 2, 3]
    assert sizes == [2, 1]


@pytest.mark.parametrize("form", [np.array, torch.tensor, list])
def test_what_is_joined_is_in_memory_of_its_own_and_can_be_written(form):
    value = form([1, 2, 3])
    if form is np.array:
        value.setflags(write=False)
    joined = join(value)[0]["ids"]
    joined[0] = 7
    assert value[0] == 1


@pytest.mark.parametrize("width", [np.float32, np.float64])
@pytest.mark.parametrize("form", [lambda a: a, torch.from_numpy])
def test_fractions_keep_their_dtype(form, width):
    joined = join(form(np.array([0.5, 1], dtype=width)), form(np.array([2], dtype=width)))[0]
    assert joined["ids"].dtype == width
    assert joined["ids"].tolist() == [0.5, 1, 2]


@pytest.mark.parametrize(
    "value", [np.zeros((2, 2)), torch.zeros(2, 2), [[1, 2], [3, 4]], torch.zeros(2, 1).long()]
)
@pytest.mark.parametrize("first", [None, np.array([1, 2]), torch.tensor([1, 2]), [1, 2]])
def test_a_value_that_is_not_flat_is_named_with_its_document(first, value):
    values = [value] if first is None else [first, value]
    with pytest.raises(ColumnError, match=rf"'ids' of document {len(values) - 1} has shape \[2, "):
        join(*values)


@pytest.mark.parametrize("odd", [None, 3, np.int64(3), torch.tensor(3)])
@pytest.mark.parametrize("first", [np.array([1]), torch.tensor([1]), [1]])
def test_a_value_that_is_missing_is_named_with_its_document(first, odd):
    with pytest.raises(ColumnError, match="'ids' of document 1 has"):
        join(first, odd)


@pytest.mark.parametrize("first", [np.ones(1), torch.ones(1)])
def test_values_that_a_batch_would_cut_from_their_graph_or_device_are_refused(first):
    with pytest.raises(RuntimeError, match="requires grad"):
        join(first, torch.ones(2, requires_grad=True))
    with pytest.raises((TypeError, RuntimeError, NotImplementedError), match="meta"):
        join(first, torch.ones(2, device="meta"))


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_columns_that_have_as_many_values_in_all_must_still_agree_by_document(form):
    columns = {"ids": [form([1, 2]), form([3])], "labels": [form([1]), form([2, 3])]}
    rules = {name: ColumnRule("token") for name in columns}
    with pytest.raises(ColumnError, match="'labels' of document 0 has length 1"):
        join_token_columns(columns, rules)
