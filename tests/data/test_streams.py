"""Streams: every document once, and after a stop the very packs that would have come."""

import itertools
import multiprocessing
import os
import pickle
import signal
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hf_neat_packing.dataset import pack_dataset
from hf_neat_packing.dataset.streams import PackedStream, pack_stream
from hf_neat_packing.errors import ColumnError, PlanningError
from hf_neat_packing.planning import best_fit, lower_bound


def documents(lengths, as_array=False):
    """Documents whose tokens are `1000 * index + position`."""
    for index, length in enumerate(lengths):
        ids = [1000 * index + position for position in range(length)]
        yield {"input_ids": np.array(ids) if as_array else ids, "labels": ids}


class Source:
    """A plain iterable that can be read again and counts what was read."""

    def __init__(self, lengths, as_array=False):
        self.lengths, self.as_array, self.read = lengths, as_array, 0

    def __iter__(self):
        for document in documents(self.lengths, self.as_array):
            self.read += 1
            yield document


def plain(packs):
    return [{k: [np.asarray(v).tolist() for v in vs] for k, vs in p.items()} for p in packs]


def lengths_like_chat(count, high=64, seed=0):
    draw = np.random.default_rng(seed).lognormal(np.log(high / 8), 0.8, count)
    return np.clip(draw.astype(int), 1, high).tolist()


def test_c43_an_endless_stream_resumes_twice_with_identical_packs():
    def endless():
        return documents(itertools.cycle([3, 5, 2]))

    whole = list(itertools.islice(pack_stream(endless(), max_length=8, buffer=6), 9))
    found = []
    state = None
    for take in (3, 2, 4):
        source = Source(itertools.cycle([3, 5, 2]))
        stream = pack_stream(source, max_length=8, buffer=6)
        if state is not None:
            stream.load_state_dict(state)
        for pack in itertools.islice(stream, take):
            found.append(pack)
            emitted = sum(len(p["input_ids"]) for p in found)
            assert source.read - emitted <= 6
        state = pickle.loads(pickle.dumps(stream.state_dict()))
    assert found == whole


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=40),
    buffer=st.integers(1, 12),
    stops=st.lists(st.integers(0, 9), max_size=3),
    policy=st.sampled_from(["truncate", "split", "drop"]),
    window=st.sampled_from([2, 64]),
)
def test_any_stops_give_the_packs_of_an_unbroken_run(lengths, buffer, stops, policy, window):
    # Small windows are packed one by one; both ways must resume.
    with mock.patch.object(best_fit, "SMALL_WINDOW", window):
        check_stops(lengths, buffer, stops, policy)


def check_stops(lengths, buffer, stops, policy):
    def stream():
        return pack_stream(Source(lengths), max_length=9, buffer=buffer, on_overlong=policy)

    unbroken = stream()
    whole = list(unbroken)
    account = unbroken.accounting
    assert account.documents == len(lengths)
    assert account.tokens == sum(lengths)
    assert account.tokens_kept == sum(len(d) for pack in whole for d in pack["input_ids"])
    assert all(sum(map(len, pack["input_ids"])) <= 9 for pack in whole)
    found, state = [], None
    for stop in [*stops, None]:
        part = stream()
        if state is not None:
            part.load_state_dict(state)
        found += itertools.islice(part, stop)
        state = part.state_dict()
        assert part.state_dict() == state
    assert found == whole
    assert part.accounting == account


def test_every_document_is_in_the_packs_once_and_the_last_are_flushed():
    lengths = lengths_like_chat(500)
    packs = list(pack_stream(Source(lengths), max_length=64, buffer=50))
    found = sorted(ids for pack in packs for ids in pack["input_ids"])
    assert found == [document["input_ids"] for document in documents(lengths)]
    assert all(pack["labels"] == pack["input_ids"] for pack in packs)


@pytest.mark.parametrize(("median", "sigma"), [(350, 1.0), (100, 0.6)], ids=["chat", "instruct"])
def test_a_buffer_of_1000_is_within_a_thousandth_of_the_bound(median, sigma):
    draw = np.random.default_rng(0).lognormal(np.log(median), sigma, 30_000)
    lengths = np.clip(draw.astype(int), 8, 4096)
    source = ({"input_ids": range(n)} for n in lengths.tolist())
    packs = sum(1 for _ in pack_stream(source, max_length=4096, buffer=1000))
    assert packs <= 1.001 * lower_bound(lengths, 4096) + 1


def test_short_documents_fill_packs_even_where_the_buffer_is_smaller_than_a_pack():
    packs = list(pack_stream(Source([2] * 1000), max_length=100, buffer=5))
    assert len(packs) == 20


@pytest.mark.parametrize(
    ("policy", "side", "pieces"),
    [
        ("truncate", "right", [[0, 1, 2, 3, 4], [1000, 1001]]),
        ("truncate", "left", [[2, 3, 4, 5, 6], [1000, 1001]]),
        ("drop", "right", [[1000, 1001]]),
        ("split", "right", [[0, 1, 2, 3, 4], [5, 6], [1000, 1001]]),
    ],
)
@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_c38_overlong_documents_follow_the_policy_and_positions_restart(policy, side, pieces, form):
    rows = [
        {**{name: form(ids) for name, ids in document.items()}, "position_ids": form(positions)}
        for document, positions in zip(documents([7, 2]), [range(7), range(2)], strict=True)
        for positions in [list(positions)]
    ]
    stream = pack_stream(rows, max_length=5, on_overlong=policy, truncate_side=side)
    packs = plain(stream)
    found = sorted(piece for pack in packs for piece in zip(*pack.values(), strict=True))
    assert [ids for ids, *_ in found] == pieces
    assert all(labels == ids for ids, labels, _ in found)
    assert all(positions == list(range(len(ids))) for ids, _, positions in found)


def test_errors_name_the_document_of_the_stream():
    with pytest.raises(PlanningError, match="Document 2 of the stream has 9 tokens"):
        list(pack_stream(Source([1, 2, 9]), max_length=5))
    with pytest.raises(PlanningError, match="Document 1 of the stream is empty"):
        list(pack_stream(Source([1, 0]), max_length=5, on_empty="error"))
    good = {"input_ids": [1, 2], "labels": [1, 2]}
    for bad, message in [
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' of document 1 has length 1 .* length 2"),
        ({"input_ids": [1, 2], "labels": None}, "'labels' of document 1 is None"),
        ({"input_ids": None, "labels": [1]}, "'input_ids' of document 1 is None"),
        ({"input_ids": 3, "labels": [1]}, "'input_ids' of document 1 is 3"),
        ({"input_ids": [1]}, r"Document 1 .* \['labels'\]"),
        ({"input_ids": [1], "label": [1]}, r"Document 1 .* \['label', 'labels'\]"),
        ([[1], [1]], "Document 1 of the stream is a list"),
    ]:
        with pytest.raises(ColumnError, match=message):
            list(pack_stream([good, bad], max_length=5))
    with pytest.raises(ColumnError, match="is a list"):
        list(pack_stream([[1, 2]], max_length=5))
    with pytest.raises(ColumnError, match=r"\['text'\]"):
        list(pack_stream([{"input_ids": [1], "text": "x"}], max_length=5))
    with pytest.raises(ColumnError, match="Tokenize"):
        list(pack_stream([{"label": 1}], max_length=5))
    with pytest.raises(PlanningError, match="on_overlong"):
        pack_stream([], max_length=5, on_overlong="cut")
    with pytest.raises(PlanningError, match="buffer=0"):
        pack_stream([], max_length=5, buffer=0)


def test_c61_a_document_with_an_image_is_never_cut():
    rows = [
        {"input_ids": [0] * 7, "pixel_values": None},
        {"input_ids": [1] * 7, "pixel_values": [1]},
    ]
    assert len(list(pack_stream(rows[:1], max_length=5, on_overlong="truncate"))) == 1
    for policy in ("truncate", "split"):
        with pytest.raises(ColumnError, match=r"Document 1 .* media in 'pixel_values'"):
            list(pack_stream(rows, max_length=5, on_overlong=policy))


def test_ignored_columns_are_left_out_and_document_columns_follow():
    rows = [{"input_ids": [i], "text": "x", "label": i} for i in range(5)]
    (pack,) = pack_stream(rows, max_length=5, columns={"text": "ignore"})
    assert pack == {"input_ids": [[i] for i in range(5)], "label": list(range(5))}


def test_a_state_of_other_settings_or_another_iterable_is_refused():
    stream = pack_stream(Source([3] * 20), max_length=8, buffer=4)
    next(iter(stream))
    state = stream.state_dict()
    for change in ({"max_length": 9}, {"buffer": 5}, {"on_overlong": "drop"}):
        other = pack_stream(Source([3] * 20), **{"max_length": 8, "buffer": 4, **change})
        with pytest.raises(PlanningError, match="its packs would not be the same"):
            other.load_state_dict(state)
    shorter = pack_stream(Source([3] * 2), max_length=8, buffer=4)
    shorter.load_state_dict(state)
    with pytest.raises(PlanningError, match="not the one that was packed"):
        next(iter(shorter))


def test_arrays_and_tensors_survive_a_state_and_a_weights_only_file(tmp_path):
    rows = [{"input_ids": torch.arange(n), "labels": np.arange(n, dtype=np.int32)} for n in [3] * 9]
    stream = pack_stream(rows, max_length=6, buffer=4)
    packs = iter(stream)
    next(packs)
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    again = pack_stream(rows, max_length=6, buffer=4)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = list(again)
    assert plain(rest) == plain(packs)
    assert rest[0]["input_ids"][0].dtype == torch.int64
    assert rest[0]["labels"][0].dtype == np.int32


def stored(lengths, shards=4):
    return Dataset.from_list(list(documents(lengths))).to_iterable_dataset(num_shards=shards)


def test_an_iterable_dataset_is_packed_as_a_stream_and_resumes_twice():
    lengths = lengths_like_chat(200)

    def make():
        return pack_dataset(stored(lengths), max_length=64, buffer=20)

    assert isinstance(make(), PackedStream)
    whole = plain(make())
    found, state = [], None
    for stop in (5, 7, None):
        stream = make()
        if state is not None:
            stream.load_state_dict(state)
        found += plain(itertools.islice(stream, stop))
        state = stream.state_dict()
    assert found == whole
    assert plain(stream) == whole, "after a resumed epoch the next one begins at the beginning"
    splits = pack_dataset(
        datasets.IterableDatasetDict(train=stored(lengths)), max_length=64, buffer=20
    )
    assert plain(splits["train"]) == whole
    for wrong in ({"materialize": True}, {"strategy": "bfd"}):
        with pytest.raises(ColumnError, match="IterableDataset"):
            pack_dataset(stored(lengths), max_length=64, **wrong)


def test_a_state_of_a_later_epoch_goes_on_in_that_epoch():
    lengths = lengths_like_chat(100)

    def make():
        return pack_stream(stored(lengths).shuffle(seed=0, buffer_size=1), max_length=64, buffer=8)

    stream = make()
    stream.set_epoch(2)
    packs = iter(stream)
    first = plain(itertools.islice(packs, 4))
    state = stream.state_dict()
    rest = plain(packs)
    again = make()
    again.load_state_dict(state)
    assert plain(again) == rest
    assert first + rest != plain(make())
    wrong = make()
    wrong.load_state_dict(state)
    wrong.set_epoch(0)
    with pytest.raises(PlanningError, match=r"set_epoch\(2\)"):
        next(iter(wrong))


def test_split_by_node_gives_each_rank_its_documents_and_resumes():
    lengths = lengths_like_chat(120)
    found = []
    for rank in range(2):

        def make(rank=rank):
            source = split_dataset_by_node(stored(lengths), rank=rank, world_size=2)
            return pack_stream(source, max_length=64, buffer=8)

        whole = plain(make())
        stream = make()
        part = plain(itertools.islice(stream, 3))
        again = make()
        again.load_state_dict(stream.state_dict())
        assert part + plain(again) == whole
        found += [ids for pack in whole for ids in pack["input_ids"]]
    assert sorted(found) == [document["input_ids"] for document in documents(lengths)]


@pytest.mark.parametrize("kind", ["datasets", "plain"])
def test_workers_pack_each_document_once(kind):
    lengths = lengths_like_chat(80)
    source = stored(lengths) if kind == "datasets" else Source(lengths)
    loader = DataLoader(pack_stream(source, max_length=64), batch_size=None, num_workers=2)
    found = sorted(np.asarray(ids).tolist() for pack in loader for ids in pack["input_ids"])
    assert found == [document["input_ids"] for document in documents(lengths)]


@pytest.mark.parametrize("kind", ["tables", "datasets", "plain"])
def test_c43_a_stateful_loader_with_two_workers_resumes_twice(kind):
    lengths = lengths_like_chat(160)

    def make():
        source = Source(lengths, True) if kind == "plain" else stored(lengths)
        source = source.with_format("numpy") if kind == "datasets" else source
        stream = pack_stream(source, max_length=64, buffer=10, by_tables=kind == "tables")
        return StatefulDataLoader(stream, batch_size=2, num_workers=2, collate_fn=plain)

    whole = list(make())
    found, state = [], None
    for stop in (3, 4, None):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        found += itertools.islice(batches, stop)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert found == whole
    tokens = sorted(ids for batch in found for pack in batch for ids in pack["input_ids"])
    assert tokens == [document["input_ids"] for document in documents(lengths)]


def pack_until_killed(folder, stop):
    """Pack, save the state after every third pack, and be killed after `stop` packs."""
    stream = pack_stream(Source(lengths_like_chat(200)), max_length=64, buffer=16)
    done = []
    if (folder / "state").exists():
        saved, done = pickle.loads((folder / "state").read_bytes())
        stream.load_state_dict(saved)
    for count, pack in enumerate(stream, 1):
        done.append(pack["input_ids"])
        if count % 3 == 0:
            (folder / "unfinished").write_bytes(pickle.dumps((stream.state_dict(), done)))
            (folder / "unfinished").replace(folder / "state")
        if count == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / "done").write_bytes(pickle.dumps(done))


def test_a_process_killed_twice_in_the_middle_loses_and_doubles_nothing(tmp_path):
    for stop, code in ((8, -signal.SIGKILL), (5, -signal.SIGKILL), (None, 0)):
        run = multiprocessing.get_context("fork").Process(
            target=pack_until_killed, args=(tmp_path, stop)
        )
        run.start()
        run.join()
        assert run.exitcode == code
    whole = pack_stream(Source(lengths_like_chat(200)), max_length=64, buffer=16)
    done = pickle.loads((tmp_path / "done").read_bytes())
    assert done == [pack["input_ids"] for pack in whole]


def test_masks_of_trained_tokens_become_labels():
    documents = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "completion_mask": [1, 0]},
    ]
    (pack,) = pack_stream(documents, max_length=8)
    assert sorted(zip(pack["input_ids"], pack["labels"], strict=True)) == [
        ([1, 2, 3], [-100, 2, 3]),
        ([4, 5], [4, -100]),
    ]
    assert set(pack) == {"input_ids", "labels"}
    documents[1]["completion_mask"] = [1]
    with pytest.raises(ColumnError, match="completion_mask"):
        list(pack_stream(documents, max_length=8))
    (declared,) = pack_stream(documents[:1], max_length=8, columns={"completion_mask": "token"})
    assert declared["completion_mask"] == [[0, 1, 1]]
