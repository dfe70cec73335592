"""The online packer: bounded look-ahead, exact resume, nothing lost at the end."""

import json
from itertools import chain, count, cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import PoolPacker, lower_bound

streams = st.lists(st.integers(1, 30), max_size=150)


def pack_all(lengths, capacity, **settings):
    packer = PoolPacker(capacity, **settings)
    return list(chain(packer.feed(enumerate(lengths)), packer.flush()))


@given(streams, st.integers(1, 20), st.integers(0, 3), st.integers(30, 90))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_stream_gives_every_document_once_and_no_pack_above_capacity(
    lengths, look_ahead, packs_ahead, capacity
):
    packs = pack_all(lengths, capacity, look_ahead=look_ahead, packs_ahead=packs_ahead)
    assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= capacity for pack in packs)


@given(streams, st.integers(1, 20), st.integers(0, 3), st.data())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_c43_a_packer_restored_from_its_state_goes_on_with_the_same_packs(
    lengths, look_ahead, packs_ahead, data
):
    whole = pack_all(lengths, 32, look_ahead=look_ahead, packs_ahead=packs_ahead)
    packs, packer = [], PoolPacker(32, look_ahead=look_ahead, packs_ahead=packs_ahead)
    documents = iter(enumerate(lengths))
    for _ in range(2):  # killed twice
        packs += packer.feed(islice(documents, data.draw(st.integers(0, 60))))
        state = json.loads(json.dumps(packer.state_dict()))
        packer = PoolPacker(32, look_ahead=look_ahead, packs_ahead=packs_ahead)
        packer.load_state_dict(state)
    packs += chain(packer.feed(documents), packer.flush())
    assert packs == whole


def test_c43_an_endless_stream_resumes_twice_and_reads_at_most_six_documents_ahead():
    def source(start):
        return islice(zip(count(), cycle([3, 5, 2]), strict=False), start, None)

    def take(packer, read, packs):
        taken = []
        documents = source(read)
        while len(taken) < packs:
            packer.push(*next(documents))
            read += 1
            assert len(packer) <= 6
            while packer.ready and len(taken) < packs:
                taken.append(packer.pop())
        return taken, read

    def new():
        return PoolPacker(8, look_ahead=6, packs_ahead=0)

    whole, _ = take(new(), 0, 9)
    got, read, packer = [], 0, new()
    for packs in (3, 2, 4):
        taken, read = take(packer, read, packs)
        got += taken
        state = packer.state_dict()
        packer = new()
        packer.load_state_dict(state)
    assert got == whole


@given(streams, st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_state_taken_while_the_last_packs_are_given_loses_and_doubles_nothing(lengths, data):
    whole = pack_all(lengths, 32, look_ahead=8)
    packer = PoolPacker(32, look_ahead=8)
    packs = list(packer.feed(enumerate(lengths)))
    for _ in range(2):  # killed twice
        packs += islice(packer.flush(), data.draw(st.integers(0, 4)))
        state = json.loads(json.dumps(packer.state_dict()))
        assert len(packer) == len(state["documents"]) == len(lengths) - sum(map(len, packs))
        packer = PoolPacker(32, look_ahead=8)
        packer.load_state_dict(state)
        assert packer.tokens == sum(lengths[document] for document in state["documents"])
    assert packs + list(packer.flush()) == whole


def test_documents_that_come_while_the_last_packs_are_given_are_packed_too():
    packer = PoolPacker(8)
    for document, length in enumerate([5, 4, 3, 2, 2]):
        packer.push(document, length)
    packs = [next(packer.flush())]
    packer.push(5, 6)
    packs += packer.flush()
    assert sorted(chain.from_iterable(packs)) == [0, 1, 2, 3, 4, 5]
    assert len(packer) == packer.tokens == 0


def test_a_state_of_a_packer_with_other_settings_is_refused():
    packer = PoolPacker(8, look_ahead=4)
    with pytest.raises(PlanningError, match="look_ahead"):
        packer.load_state_dict(PoolPacker(8, look_ahead=5).state_dict())
    with pytest.raises(PlanningError, match="version"):
        packer.load_state_dict({})


def test_documents_that_fit_in_no_pack_are_refused_before_anything_changes():
    packer = PoolPacker(8)
    for length in (0, 9):
        with pytest.raises(PlanningError, match=f"has {length} tokens"):
            packer.push(0, length)
    assert len(packer) == packer.tokens == 0
    with pytest.raises(PlanningError, match="look_ahead=0"):
        PoolPacker(8, look_ahead=0)


def test_an_empty_packer_gives_nothing():
    packer = PoolPacker(8)
    assert packer.pop() == []
    assert list(packer.flush()) == []
    assert not packer.ready


def test_c44_a_stream_shorter_than_one_pack_is_one_pack():
    assert pack_all([3], 64) == [[0]]


def test_the_pool_holds_three_packs_of_tokens_when_documents_are_short():
    packer = PoolPacker(1000, look_ahead=4)
    for document in range(29):
        packer.push(document, 100)
        assert not packer.ready
    packer.push(29, 100)
    assert packer.ready
    assert len(packer.pop()) == 10


@pytest.mark.parametrize(("median", "sigma"), [(350, 1.0), (100, 0.6)])
@pytest.mark.parametrize("capacity", [2048, 32_768])
def test_a_buffer_of_a_thousand_documents_packs_within_a_thousandth(median, sigma, capacity):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, 40_000), 8, capacity).astype(int)
    packs = pack_all(lengths.tolist(), capacity, look_ahead=1000)
    assert len(packs) <= lower_bound(lengths, capacity) * 1.001 + 1
