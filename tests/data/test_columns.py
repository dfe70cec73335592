"""Rules of columns: known, declared, or an error that says what to write."""

import numpy as np
import pytest
import torch

from hf_neat_packing.columns import (
    DEFAULT_COLUMN_RULES,
    ColumnRule,
    check_document_lengths,
    describe_documents,
    resolve_column_rules,
)
from hf_neat_packing.errors import ColumnError


def test_labels_are_padded_with_the_value_that_the_loss_ignores():
    assert DEFAULT_COLUMN_RULES["labels"] == ColumnRule("token", pad_value=-100)
    assert DEFAULT_COLUMN_RULES["shift_labels"].pad_value == -100
    assert DEFAULT_COLUMN_RULES["input_ids"].kind == "token"


def test_an_unknown_column_is_an_error_that_gives_the_line_to_write():
    with pytest.raises(ColumnError) as caught:
        resolve_column_rules(["input_ids", "text", "my_mask"])
    message = str(caught.value)
    assert "['text', 'my_mask']" in message
    assert 'columns={"text": "...", "my_mask": "..."}' in message
    assert "input_ids" not in message


def test_declared_rules_go_before_the_defaults_and_may_be_strings():
    rules = resolve_column_rules(
        ["labels", "text", "weights"],
        {
            "labels": "document",
            "text": "ignore",
            "weights": ColumnRule("token", 1.0),
            "gone": "token",
        },
    )
    assert rules == {
        "labels": ColumnRule("document"),
        "text": ColumnRule("ignore"),
        "weights": ColumnRule("token", 1.0),
    }


def test_a_declared_kind_that_does_not_exist_is_refused_with_its_column():
    with pytest.raises(ColumnError, match=r"'text' is declared as 'tokens'"):
        resolve_column_rules(["text"], {"text": "tokens"})
    with pytest.raises(ColumnError, match="'rows'"):
        ColumnRule("rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["seq_lengths", "cu_seq_lens_q", "_packed_seq_ids"])
def test_a_column_of_boundaries_says_that_the_set_is_packed_already(name):
    with pytest.raises(ColumnError, match="nest_flat_packs"):
        resolve_column_rules(["input_ids", name])
    assert resolve_column_rules([name], {name: "ignore"})[name].kind == "ignore"


@pytest.mark.parametrize("form", [list, np.array], ids=["lists", "arrays"])
def test_c26_a_short_column_names_column_document_and_both_lengths(form):
    check_document_lengths({"input_ids": form([3, 2, 4]), "labels": form([3, 2, 4])})
    with pytest.raises(ColumnError) as caught:
        check_document_lengths({"input_ids": form([3, 2, 4]), "completion_mask": form([3, 2, 3])})
    for part in ("'completion_mask'", "document 2", "length 3", "'input_ids'", "length 4"):
        assert part in str(caught.value)


def test_a_column_with_another_number_of_documents_is_refused():
    with pytest.raises(ColumnError, match=r"'labels' has 1 documents where 'input_ids' has 2"):
        check_document_lengths({"input_ids": [3, 2], "labels": [3]})


def test_documents_of_lists_arrays_and_tensors_are_described_alike():
    documents = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "label": 1},
        {"input_ids": np.array([4, 5]), "labels": torch.tensor([4, 5]), "label": 0},
    ]
    rules = describe_documents(documents)
    assert {name: rule.kind for name, rule in rules.items()} == {
        "input_ids": "token",
        "labels": "token",
        "label": "document",
    }


@pytest.mark.parametrize("value", [1, 1.5, True, np.int64(1), torch.tensor(1)])
def test_c28_scalar_labels_are_one_value_per_document(value):
    rules = describe_documents([{"input_ids": [1, 2], "labels": value}] * 2)
    assert rules["labels"].kind == "document"


def test_c26_documents_whose_columns_disagree_name_the_document():
    documents = [{"input_ids": [1, 2], "completion_mask": [1, 0]}] * 2
    documents.append({"input_ids": [1, 2, 3], "completion_mask": [0, 1]})
    with pytest.raises(ColumnError, match=r"'completion_mask' of document 2 has length 2 .* 3"):
        describe_documents(documents)


def test_a_document_without_a_column_of_the_others_is_refused():
    with pytest.raises(ColumnError, match=r"Document 1 .* \['labels'\]"):
        describe_documents([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}])


@pytest.mark.parametrize(("value", "found"), [(None, "None"), (3, "single value 3")])
def test_a_missing_token_value_names_column_and_document(value, found):
    documents = [{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": value}]
    with pytest.raises(ColumnError, match=f"'labels' of document 1 has .*{found}"):
        describe_documents(documents)
