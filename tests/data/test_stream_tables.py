"""Stored streams read by tables: the documents that rows would give; and the contract test of `streams_tables`."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from datasets import (
    Dataset,
    Features,
    Image,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    interleave_datasets,
)
from datasets.distributed import split_dataset_by_node
from test_streams import documents, lengths_like_chat, plain
from torch.utils.data import DataLoader

from hf_neat_packing.dataset.packed_stream import _has_tables as has_tables
from hf_neat_packing.dataset.stream_rows import own
from hf_neat_packing.dataset.stream_tables import StreamTables, documents_in
from hf_neat_packing.dataset.streams import pack_stream
from hf_neat_packing.errors import ColumnError, PlanningError

TOKENS = ("input_ids", "labels", "seen")
COLUMNS = {"name": "document", "score": "document", "seen": "token"}


def stored(count=150, shards=3):
    rows = [
        {**d, "name": f"number {i}", "score": i / 2, "seen": [x % 2 == 0 for x in d["labels"]]}
        for i, d in enumerate(documents(lengths_like_chat(count)))
    ]
    return Dataset.from_list(rows).to_iterable_dataset(num_shards=shards)


def packed(source, **keywords):
    keywords = {"by_tables": True, **keywords}
    return pack_stream(source, max_length=64, columns=COLUMNS, **keywords)


def one_by_one(source):
    """The documents of a source as its rows, which no table is read for."""
    return [dict(row) for row in source]


SOURCES = {
    "as it is": lambda source: source,
    "shuffled": lambda source: source.shuffle(seed=3, buffer_size=20),
    "taken": lambda source: source.skip(7).take(90),
    "selected": lambda source: source.select_columns(["input_ids", "name"]),
    "of a rank by shards": lambda source: split_dataset_by_node(source, 1, 3),
    "of a rank by rows": lambda source: split_dataset_by_node(source, 1, 2),
    "interleaved": lambda source: interleave_datasets(
        [source, stored(40, 2)], probabilities=[0.3, 0.7], seed=1, stopping_strategy="all_exhausted"
    ),
    "concatenated": lambda source: concatenate_datasets([source, stored(40, 2)]),
    "cast and repeated": lambda source: source.cast_column(
        "input_ids", List(Value("int64"))
    ).repeat(2),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_tables_bring_the_documents_of_the_rows_in_their_order(make):
    source = make(stored())
    assert has_tables(source)
    reader, found = StreamTables(source, 16, TOKENS), []
    while block := reader.read(8):
        found += list(block)
    assert plain_documents(found) == plain_documents(one_by_one(source))
    whole = plain(packed(source, buffer=16))
    ids = sorted(ids for pack in whole for ids in pack["input_ids"])
    assert ids == sorted(row["input_ids"] for row in one_by_one(source))


def plain_documents(rows):
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in rows]


@pytest.mark.parametrize("name", ["as it is", "taken", "of a rank by shards", "interleaved"])
def test_a_stream_by_tables_resumes_at_any_stop_with_identical_packs(name):
    def make():
        return packed(SOURCES[name](stored(90)), buffer=7)

    assert has_tables(make().source)
    whole = plain(make())
    assert len(whole) > 5
    for stop in range(0, len(whole), 1 + len(whole) // 12):
        stream = make()
        found = plain(itertools.islice(stream, stop))
        again = make()
        again.load_state_dict(pickle.loads(pickle.dumps(stream.state_dict())))
        found += plain(itertools.islice(again, 2))
        third = make()
        third.load_state_dict(again.state_dict())
        assert found + plain(third) == whole, stop
    assert plain(third) == whole, "the next epoch begins at the beginning"


def test_rows_that_somebody_makes_or_formats_are_read_as_rows():
    source = stored()
    image = Features({"input_ids": List(Value("int32")), "image": Image()})
    others = [
        source.map(lambda row: row),
        source.filter(lambda row: row["score"] > 3),
        source.with_format("numpy"),
        interleave_datasets([source, source.filter(lambda row: True)]),
        IterableDataset.from_generator(documents, gen_kwargs={"lengths": (3, 4)}),
        Dataset.from_dict({"input_ids": [[1]], "image": [None]}, image).to_iterable_dataset(),
        [{"input_ids": [1]}],
    ]
    assert has_tables(source)
    assert not any(map(has_tables, others))
    for other in others:
        with pytest.raises(PlanningError, match="Leave by_tables out"):
            packed(other)
    pack = next(iter(packed(source.with_format("numpy"), by_tables=False)))
    assert isinstance(pack["input_ids"][0], np.ndarray)
    (pack,) = pack_stream(others[4], max_length=8)
    assert sorted(pack["input_ids"]) == [[0, 1, 2], [1000, 1001, 1002, 1003]]


@pytest.mark.parametrize("by_tables", [True, False])
def test_a_state_saved_before_the_source_is_read_again_knows_its_place(by_tables):
    def make():
        return packed(stored(300), buffer=128, by_tables=by_tables)

    whole = plain(make())
    stream, found, state = make(), [], None
    for stop in (3, 1, 1, 2, None):
        stream = make()
        if state is not None:
            stream.load_state_dict(state)
        found += plain(itertools.islice(stream, stop))
        state = pickle.loads(pickle.dumps(stream.state_dict()))
    assert found == whole


def test_a_source_with_a_state_of_its_own_is_not_read_by_tables():
    source = stored(40)
    rows = iter(source)
    for _ in range(30):
        next(rows)
    resumed, stream = stored(40), packed(stored(40))
    resumed.load_state_dict(source.state_dict())
    with pytest.raises(PlanningError, match="a state of its own"):
        packed(resumed)
    stream.source.load_state_dict(source.state_dict())
    with pytest.raises(PlanningError, match="load_state_dict of the stream"):
        next(iter(stream))
    assert sum(len(pack["name"]) for pack in packed(resumed, by_tables=False)) == 10


def test_a_stream_travels_after_it_was_read():
    stream = packed(stored(), buffer=16)
    whole = plain(stream)
    next(iter(stream))
    for again in (pickle.loads(pickle.dumps(stream)), copy.deepcopy(stream)):
        assert again.state_dict() == stream.state_dict()
        assert plain(again) == whole
    lone = pack_stream(stored().select_columns(["input_ids"]), max_length=64)
    next(iter(lone))
    assert len(plain(pickle.loads(pickle.dumps(lone)))) > 3


def test_only_tokens_become_arrays():
    data = Dataset.from_dict({"input_ids": [[1, 2], [3], [4]], "scores": [[0.5, 1.0], [2.0], []]})
    packs = [
        next(
            iter(
                pack_stream(
                    data.to_iterable_dataset(),
                    max_length=8,
                    columns={"scores": "document"},
                    by_tables=by_tables,
                )
            )
        )
        for by_tables in (True, False)
    ]
    assert isinstance(packs[0]["input_ids"][0], np.ndarray)
    assert packs[0]["scores"] == packs[1]["scores"]
    assert all(type(scores) is list for scores in packs[0]["scores"])


def test_an_epoch_that_is_set_on_the_source_reaches_its_tables():
    source = stored().shuffle(seed=0, buffer_size=5)
    stream = packed(source, buffer=16)
    first = plain(stream)
    source.set_epoch(1)
    second = plain(stream)
    assert second != first
    assert sorted(i for p in second for i in p["name"]) == sorted(
        i for p in first for i in p["name"]
    )
    stream.set_epoch(0)
    assert plain(stream) == first


def test_workers_share_the_tables_of_a_source():
    loader = DataLoader(packed(stored(), buffer=16), batch_size=None, num_workers=2)
    found = sorted(name for pack in loader for name in pack["name"])
    assert found == sorted(row["name"] for row in stored())


def test_a_null_is_refused_by_the_number_of_its_document():
    ids = [[1, 2], [3], [4], None, [5]]
    source = Dataset.from_dict({"input_ids": ids}).to_iterable_dataset()
    assert has_tables(source)
    with pytest.raises(ColumnError, match="document 3 is None"):
        list(pack_stream(source, max_length=4, buffer=2, by_tables=True))


def test_a_document_that_waits_lets_go_of_its_table():
    table = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "name": ["a", "b"]}).data.table
    shared = tuple(documents_in(table, TOKENS)[1].values())
    assert shared[0].base is not None
    kept = own(shared)
    assert kept[0].base is None
    assert (kept[0].tolist(), kept[1]) == ([3, 4], "b")
    stream = packed(stored(600), buffer=8)
    for _ in stream:
        waiting = [value for row in stream._waiting for value in row]
        if stream._choices % 8 == 0:
            assert not any(getattr(value, "base", None) is not None for value in waiting)
    assert stream._choices > 16


def test_an_empty_stored_stream_gives_nothing():
    empty = stored().skip(1000)
    assert has_tables(empty)
    assert list(packed(empty)) == []
