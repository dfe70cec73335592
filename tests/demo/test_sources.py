"""Documents, tokens and lengths from files, folders and ids, and errors that say what to write."""

import json

import datasets
import numpy as np
import pytest

from hf_neat_packing.errors import ColumnError
from hf_neat_packing.sources import (
    document_lengths,
    load_documents,
    load_lengths,
    load_tokenizer,
    text_column,
    token_ids,
)


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_jsonl_parquet_folder_and_saved_set_give_the_same_texts(jsonl, texts, tmp_path):
    loaded = load_documents(str(jsonl))
    loaded.to_parquet(tmp_path / "texts.parquet")
    loaded.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_bytes(jsonl.read_bytes())
    for source in ("texts.jsonl", "texts.parquet", "saved", "folder"):
        assert load_documents(str(tmp_path / source))["text"][:] == texts


def test_blank_lines_separate_documents_and_without_them_every_line_is_one(tmp_path):
    lines = write(tmp_path, "lines.txt", "one\ntwo\nthree\n")
    paragraphs = write(tmp_path, "paragraphs.txt", "one\r\nmore\r\n\r\ntwo\r\n")
    assert load_documents(lines)["text"][:] == ["one", "two", "three"]
    assert [text.strip() for text in load_documents(paragraphs)["text"]] == ["one\nmore", "two"]


def test_a_dictionary_of_splits_gives_the_one_asked_for(tmp_path):
    one, two = (datasets.Dataset.from_dict({"text": [name]}) for name in ("one", "two"))
    datasets.DatasetDict(first=one, second=two).save_to_disk(tmp_path / "both")
    source = str(tmp_path / "both")
    assert load_documents(source, split="second")["text"][:] == ["two"]
    with pytest.raises(ColumnError, match=r"it has first, second. Write: --split first"):
        load_documents(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "is empty"),
        ("blank.txt", "\n \n", "blank lines only"),
        ("bad.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is no JSON"),
        ("numbers.jsonl", '{"text": "a"}\n7\n', "line 2 is no JSON object"),
        ("notes.md", "# hi", "Accepted: a file"),
        ("binary.txt", b"\xff\xfe\x00\x01", "cannot be read as text"),
    ],
)
def test_a_file_that_holds_no_documents_is_named(tmp_path, name, content, message):
    with pytest.raises(ColumnError, match=message) as caught:
        load_documents(write(tmp_path, name, content))
    assert name in str(caught.value)


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(source):
    with pytest.raises(ColumnError, match="There is no file or folder"):
        load_documents(source)


def test_a_folder_without_data_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ColumnError, match="cannot be read as a data set"):
        load_documents(str(tmp_path / "empty"))


def test_the_text_column_is_text_or_the_only_one_or_the_one_asked_for():
    one = datasets.Dataset.from_dict({"body": ["a"], "number": [1]})
    two = datasets.Dataset.from_dict({"body": ["a"], "title": ["b"]})
    tokens = datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"]})
    assert text_column(one) == "body"
    assert text_column(two, "title") == "title"
    assert text_column(tokens) is None
    assert text_column(tokens, "text") == "text"
    with pytest.raises(ColumnError, match="--text-column body, or another of body, title"):
        text_column(two)
    with pytest.raises(ColumnError, match="is no text"):
        text_column(one, "number")
    with pytest.raises(ColumnError, match="is not there"):
        text_column(one, "nowhere")


def test_every_document_ends_once_with_the_end_of_text(tokenizer):
    end = tokenizer.eos_token_id
    found = list(token_ids(["def", "", f"x{tokenizer.eos_token}"], tokenizer))
    assert [ids.count(end) for ids in found] == [1, 1, 1]
    assert all(ids[-1] == end for ids in found)


def test_a_document_that_is_no_text_is_named_by_its_number(tokenizer):
    with pytest.raises(ColumnError, match="Document 42 is None"):
        list(token_ids(["a", "b", None], tokenizer, first=40))


def test_a_tokenizer_that_is_not_given_or_not_there_is_asked_for(tmp_path):
    with pytest.raises(ColumnError, match="Write --tokenizer"):
        load_tokenizer(None)
    with pytest.raises(ColumnError, match="Accepted: a folder"):
        load_tokenizer(str(tmp_path))


def test_a_single_tokenizer_file_is_enough(model_folder, texts):
    whole = load_tokenizer(str(model_folder))
    single = load_tokenizer(str(model_folder / "tokenizer.json"))
    assert single(texts)["input_ids"] == whole(texts)["input_ids"]


def test_lengths_come_from_files_of_numbers_and_nothing_else_is_taken_for_them(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([3, 1, 2], dtype=np.int16))
    assert load_lengths(str(tmp_path / "lengths.npy")).tolist() == [3, 1, 2]
    assert load_lengths(write(tmp_path, "a.txt", "3\n\n1\n2\n")).tolist() == [3, 1, 2]
    assert load_lengths(write(tmp_path, "b.json", "[3, 1, 2]")).tolist() == [3, 1, 2]
    assert load_lengths(write(tmp_path, "c.txt", "3 little pigs\n")) is None
    assert load_lengths(write(tmp_path, "d.json", json.dumps([{"text": "a"}]))) is None
    assert load_lengths(write(tmp_path, "e.json", "[true]")) is None
    np.save(tmp_path / "table.npy", np.zeros((2, 2)))
    with pytest.raises(ColumnError, match=r"shape \(2, 2\)"):
        load_lengths(str(tmp_path / "table.npy"))


def test_lengths_of_texts_are_counted_and_lengths_of_tokens_are_read(
    jsonl, texts, model_folder, tokenizer, tmp_path
):
    expected = [len(ids) for ids in token_ids(texts, tokenizer)]
    assert document_lengths(str(jsonl), tokenizer=str(model_folder)).tolist() == expected
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "note": ["a", "b"]})
    tokens.to_parquet(tmp_path / "tokens.parquet")
    assert document_lengths(str(tmp_path / "tokens.parquet")).tolist() == [2, 1]
