"""Packed training on two processes, under each parallelism of torch, equals ONE process on documents alone."""

import runpy

import datasets
import numpy as np
import pytest
from distributed_processes import TESTS, run_ranks, start_ranks, wait
from distributed_streams import documents

from hf_neat_packing import pack_dataset

DATA_PARALLEL = [
    "ddp",
    "ddp, dry run before",
    "ddp, use_reentrant=True",
    "ddp, use_reentrant=False",
    "fsdp2",
    "fsdp2, dry run before",
    "fsdp2, use_reentrant=False",
    "fsdp2, offloaded",
]
RECURRENT = [
    f"{model}, isolate {when} {wrapper}"
    for model in ("mamba2", "qwen3_5_text")
    for when in ("before", "after")
    for wrapper in ("ddp", "fsdp2")
    if model == "mamba2" or (when == "before") == (wrapper == "ddp")
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both processes have found; they start once for all tests of this file."""
    return run_ranks("distributed_training.py", tmp_path_factory.mktemp("ranks"))


def found_by_both(ranks, name):
    for rank in ranks:
        yield rank[name]


@pytest.mark.parametrize("way", [*DATA_PARALLEL, *RECURRENT])
def test_weights_after_steps_of_two_ranks_are_those_of_one_process(ranks, way):
    for found in found_by_both(ranks, way):
        assert found["steps"] == 3
        assert found["parameters"] == found["all_parameters"]
        assert found["ranks_agree"]
        assert found["excess"] <= 1
        assert found["loss_excess"] <= 1


@pytest.mark.parametrize("way", ["tensor parallel", "tensor parallel, dry run before"])
def test_heads_that_two_ranks_share_give_the_weights_of_one_process(ranks, way):
    for found in found_by_both(ranks, way):
        assert found["steps"] == 5
        assert found["parameters"] == found["all_parameters"]
        assert found["excess"] <= 1
        assert found["loss_excess"] <= 1


def test_the_trainer_on_two_processes_trains_as_one_does_on_documents_alone(ranks):
    for found in found_by_both(ranks, "trainer"):
        assert (found["world_size"], found["steps"]) == (2, 3)
        assert found["excess"] <= 1
        assert found["losses"] == pytest.approx(found["expected_losses"], rel=1e-6)
    assert all(found["excess"] > 100 for found in found_by_both(ranks, "trainer, control"))


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_with_four_microbatches_in_flight_train_as_one_process(ranks, schedule):
    both = list(found_by_both(ranks, schedule))
    assert sum(found["parameters"] for found in both) == both[0]["all_parameters"]
    assert all(found["excess"] <= 1 for found in both)


def test_the_same_batches_without_their_boundaries_are_far_from_one_process(ranks):
    ways = ["ddp", "fsdp2", "tensor parallel", "ScheduleGPipe", "Schedule1F1B", "streams"]
    ways += ["mamba2, isolate after fsdp2", "qwen3_5_text, isolate after fsdp2"]
    for way in ways:
        for found in found_by_both(ranks, way):
            assert found["control"] > 100, way


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_models_that_reach_only_sdpa_are_exact_on_two_ranks(ranks, wrapper):
    for found in found_by_both(ranks, f"sdpa only, {wrapper}, exact"):
        assert found["relative"] < 1e-12
    for found in found_by_both(ranks, f"sdpa only, {wrapper}, control"):
        assert found["relative"] > 1e-2


def test_c58_ranks_plan_alike_by_themselves_and_get_as_many_steps(ranks):
    for found in found_by_both(ranks, "plans"):
        assert found["same_plan"]
        first, second = found["given"]
        assert len(first) == len(second) == 3
        given = [pack for batch in first + second for pack in batch]
        assert set(given) == set(range(found["packs"]))
        assert len(given) == found["packs"] + 1, "one pack fills the last step, without labels"


def test_streams_split_by_node_lose_no_document_where_one_ends_before_the_other(ranks):
    both = list(found_by_both(ranks, "streams"))
    assert both[0]["steps"] != both[1]["steps"]
    assert sorted(both[0]["documents"] + both[1]["documents"]) == sorted(documents())
    assert all(found["excess"] <= 1 for found in both)


def test_a_rank_that_raises_in_a_worker_of_its_loader_ends_the_other(tmp_path):
    processes = start_ranks("distributed_failure.py", tmp_path)
    codes = wait(processes, seconds=300, all_must_succeed=False)
    shown = (tmp_path / "rank1.log").read_text()
    assert all(code not in (None, 0) for code in codes), shown[-3000:]
    assert "Document 5 of the stream has 99 tokens" in shown
    assert "rank 0, step 0" in (tmp_path / "rank0.log").read_text()
    assert not list(tmp_path.glob("finished-*"))


def test_a_rank_that_stops_answering_costs_the_other_its_timeout_and_no_more(ranks):
    waited = ranks[0]["silent rank"]
    assert waited["error"] == "RuntimeError"
    assert "imed out" in waited["message"] or "timeout" in waited["message"].lower()


def test_packs_written_by_two_processes_are_those_of_the_view(tmp_path):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 60, 500)
    ids = [generator.integers(0, 1000, n).tolist() for n in lengths]
    datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(tmp_path / "documents")
    stored = datasets.load_from_disk(tmp_path / "documents")
    view = pack_dataset(stored, max_length=64)
    expected = [[ids.tolist() for ids in pack["input_ids"]] for pack in view]
    view.save_to_disk(tmp_path / "packs", num_proc=2)
    assert len(list((tmp_path / "packs").glob("*.arrow"))) == 2
    assert datasets.load_from_disk(tmp_path / "packs")["input_ids"][:] == expected
    written = pack_dataset(stored, max_length=64, materialize=True, num_proc=2)
    assert written["input_ids"][:] == expected
    assert sorted(ids for pack in expected for ids in pack) == sorted(ids)


@pytest.mark.parametrize("mixture", ["chat", "long tail"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_lose_less_than_half_as_much_where_packs_are_dealt_by_cost(mixture, ranks):
    benchmark = runpy.run_path(str(TESTS.parent / "benchmarks" / "ranks.py"))
    lost = benchmark["planned"](benchmark["Case"](mixture, 4096, 2048, ranks), documents=10_000)
    assert 0 <= lost.by_cost < lost.plain / 2
