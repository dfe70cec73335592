"""The documents of the demonstration and the tokenizer trained on them."""

import re
from pathlib import Path

import pytest

from hf_neat_packing.demo.corpus import stdlib_functions
from hf_neat_packing.demo.tokenizer import END_OF_TEXT, demo_tokenizer
from hf_neat_packing.errors import ColumnError

SOURCE = '''"""A module."""
import functools
\x0c
@functools.cache
def first(x):
    # A comment that stays.
    def inner():
        return x
    return inner

class Thing:
    if True:
        async def method(self):
            return """
    text"""
try:
    pass
except ValueError:
    def handler(): pass
'''


def library(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("def first(x):\n    return x\ndef again(): pass\n")
    (tmp_path / "c.py").write_text("def again(): pass\n")
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\ndef latin(): pass\n")
    for left_out in ("test", "site-packages"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "d.py").write_text("def left_out(): pass\n")
    return tmp_path


def names(functions: list[str]) -> list[str]:
    return [re.search(r"def (\w+)", function)[1] for function in functions]


def test_every_function_is_one_document_and_each_text_comes_once(tmp_path):
    found = stdlib_functions(library(tmp_path))
    assert names(found) == ["first", "method", "handler", "first", "again"]
    assert len(set(found)) == len(found)


def test_a_function_keeps_decorators_comments_and_what_is_inside_it(tmp_path):
    first = stdlib_functions(library(tmp_path))[0]
    assert first.startswith("@functools.cache\ndef first(x):")
    assert "# A comment that stays." in first
    assert first.endswith("return inner")


def test_the_interpreter_in_use_has_thousands_of_functions():
    found = stdlib_functions()
    assert len(found) > 5000
    assert any(function.startswith("def dedent(") for function in found)


def test_an_interpreter_without_sources_is_named_and_another_way_is_given(tmp_path):
    with pytest.raises(ColumnError, match="--data FILE"):
        stdlib_functions(tmp_path)


def test_any_text_has_tokens_and_comes_back_from_them(texts, tmp_path):
    tokenizer, _ = demo_tokenizer(texts, vocab_size=300, cache=tmp_path)
    text = "never seen: Ωß\n\t\x00 7"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert len(tokenizer) <= 300


def test_the_second_run_reads_the_same_tokenizer_from_the_cache(texts, tmp_path):
    first, cached_first = demo_tokenizer(texts, vocab_size=300, cache=tmp_path)
    second, cached_second = demo_tokenizer(texts, vocab_size=300, cache=tmp_path)
    assert (cached_first, cached_second) == (False, True)
    assert first.get_vocab() == second.get_vocab()
    assert first(texts)["input_ids"] == second(texts)["input_ids"]


def test_other_documents_or_another_size_are_another_tokenizer(texts, tmp_path):
    demo_tokenizer(texts, vocab_size=300, cache=tmp_path)
    assert demo_tokenizer(texts[1:], vocab_size=300, cache=tmp_path)[1] is False
    assert demo_tokenizer(texts, vocab_size=290, cache=tmp_path)[1] is False


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(texts, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    tokenizer, cached = demo_tokenizer(texts, vocab_size=300, cache=blocked)
    assert not cached
    assert tokenizer("def")["input_ids"]
