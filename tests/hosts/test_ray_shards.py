"""Ray Data packs shards on two workers: each document once, also where workers are killed."""

import json
import os
import runpy
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray_workers import DeadlyWord

import hf_neat_packing
from hf_neat_packing import DataCollatorForNeatPacking, pack_dataset
from hf_neat_packing.errors import (
    ColumnError,
    MissingDependencyError,
    NeatPackingError,
    PlanningError,
)
from hf_neat_packing.shards import pack_shards

SHARDS, DOCUMENTS, GROUP = 3, 400, 100
MAX_LENGTH = 64
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_packing.py"


@pytest.fixture(scope="module", autouse=True)
def _two_workers():
    """One local cluster of two workers for the whole file."""
    before = dict(os.environ)
    repository = os.path.dirname(os.path.dirname(hf_neat_packing.__file__))
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([repository, os.path.dirname(__file__)]),
    }
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Documents of 1 to 60 tokens; the first token is the document's number."""
    folder = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(0)
    for shard in range(SHARDS):
        write_shard(folder / f"{shard}.parquet", shard * DOCUMENTS, generator)
    return folder


def write_shard(path, first, generator, longest=60):
    lengths = generator.integers(1, longest + 1, DOCUMENTS)
    documents = [
        [number, *generator.integers(0, 1000, length - 1).tolist()]
        for number, length in enumerate(lengths.tolist(), start=first)
    ]
    labels = [[-100, *ids[1:]] for ids in documents]
    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(documents, kind), "labels": pa.array(labels, kind)})
    pq.write_table(table, path, row_group_size=GROUP)


def documents_of(folder):
    rows = [
        row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    return rows


def flat(packs):
    return [
        {"input_ids": ids, "labels": labels}
        for pack in packs
        for ids, labels in zip(pack["input_ids"], pack["labels"], strict=True)
    ]


def by_number(documents):
    return sorted(documents, key=lambda document: document["input_ids"][0])


def test_two_workers_write_the_packs_that_one_process_plans(shards, tmp_path):
    result = pack_shards(
        shards, tmp_path / "packs", max_length=MAX_LENGTH, tokens_per_file=5000, num_workers=2
    )
    assert len(result.files) == 6
    assert by_number(flat(documents_of(result.folder))) == documents_of(shards)
    assert (result.documents, result.documents_kept) == (1200, 1200)
    assert result.fill > 0.9
    # A part is two row groups, and its file what `pack_dataset` makes of their documents.
    for number, path in enumerate(result.files):
        shard, half = divmod(number, 2)
        table = pq.ParquetFile(shards / f"{shard}.parquet").read_row_groups(
            [2 * half, 2 * half + 1]
        )
        expected = pack_dataset(datasets.Dataset(table), max_length=MAX_LENGTH)
        written = pq.read_table(path).to_pylist()
        assert written == [
            {name: [ids.tolist() for ids in column] for name, column in pack.items()}
            for pack in expected
        ]
    summary = json.loads((result.folder / "_packing.json").read_text())
    assert summary["packs"] == result.packs
    assert not list(result.folder.rglob(".*"))
    assert not (tmp_path / "packs.unfinished").exists()


def test_the_folder_is_a_data_set_that_trains(shards, tmp_path):
    result = pack_shards(
        shards / "0.parquet", tmp_path / "packs", max_length=MAX_LENGTH, split="chat"
    )
    assert len(result.files) == 1
    loaded = datasets.load_dataset(str(result.folder), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["chat"]
    packs = loaded["chat"]
    assert len(packs) == result.packs
    batch = DataCollatorForNeatPacking()([packs[0]])
    assert batch["input_ids"].tolist()[0] == [id for ids in packs[0]["input_ids"] for id in ids]
    assert batch["_packed_seq_ids"].max() == len(packs[0]["input_ids"])


def test_a_worker_killed_while_it_writes_loses_and_doubles_nothing(shards, tmp_path):
    options = {"max_length": MAX_LENGTH, "tokens_per_file": 5000}
    undisturbed = pack_shards(shards, tmp_path / "undisturbed", **options)
    deadly = {"labels": DeadlyWord(tmp_path, times=1)}
    result = pack_shards(shards, tmp_path / "packs", columns=deadly, **options)
    assert len(list(tmp_path.glob("death-*"))) >= 1
    assert result.reused == 0
    assert by_number(flat(documents_of(result.folder))) == documents_of(shards)
    assert [path.read_bytes() for path in result.files] == [
        path.read_bytes() for path in undisturbed.files
    ]
    assert not list(result.folder.rglob(".*"))


def test_a_run_that_ended_with_its_workers_goes_on_where_it_stopped(shards, tmp_path):
    options = {"max_length": MAX_LENGTH, "tokens_per_file": 5000, "num_workers": 1}
    output = tmp_path / "packs"
    deadly = {"labels": DeadlyWord(tmp_path, times=1, after=2)}
    with pytest.raises(NeatPackingError, match="workers have died over this part"):
        pack_shards(shards, output, columns=deadly, max_retries=0, **options)
    assert (tmp_path / "packs.unfinished").is_dir()
    assert not output.exists(), "a folder of this name is complete"
    with pytest.raises(ColumnError, match="other options"):
        pack_shards(shards, output, max_length=MAX_LENGTH + 1)
    result = pack_shards(shards, output, columns={"labels": "token"}, **options)
    assert 2 <= result.reused < 6
    assert by_number(flat(documents_of(result.folder))) == documents_of(shards)
    assert not list(result.folder.rglob(".*"))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"packs"}


def test_a_document_that_fits_in_no_pack_is_named_with_its_shard_and_counted_where_dropped(
    shards, tmp_path
):
    with pytest.raises(PlanningError, match=r"0\.parquet .row groups 0 to 3.: document \d+ has"):
        pack_shards(shards / "0.parquet", tmp_path / "packs", max_length=32)
    result = pack_shards(
        shards / "0.parquet", tmp_path / "packs", max_length=32, on_overlong="drop", force=True
    )
    kept = [doc for doc in documents_of(shards)[:DOCUMENTS] if len(doc["input_ids"]) <= 32]
    assert by_number(flat(documents_of(result.folder))) == kept
    assert result.documents_dropped == DOCUMENTS - len(kept)
    assert result.tokens == result.tokens_kept + result.tokens_dropped
    with pytest.raises(ColumnError, match="force=True"):
        pack_shards(shards / "0.parquet", tmp_path / "packs", max_length=64)
    nothing = pack_shards(shards / "0.parquet", tmp_path / "nothing", max_length=64, min_length=99)
    assert (nothing.packs, nothing.fill, nothing.documents_dropped) == (0, 0.0, DOCUMENTS)
    assert documents_of(nothing.folder) == []
    result = pack_shards(shards / "0.parquet", tmp_path / "packs", max_length=64, force=True)
    assert by_number(flat(documents_of(result.folder))) == documents_of(shards)[:DOCUMENTS]


def test_shards_that_would_lose_or_double_documents_are_refused(shards, tmp_path):
    shard = shards / "0.parquet"
    with pytest.raises(ColumnError, match="given twice"):
        pack_shards([shard, shard], tmp_path / "packs", max_length=64)
    with pytest.raises(ColumnError, match="No such file"):
        pack_shards([shard, tmp_path / "none.parquet"], tmp_path / "packs", max_length=64)
    with pytest.raises(ColumnError, match=r"No \*\.parquet"):
        pack_shards(tmp_path, shards / "packs", max_length=64)
    with pytest.raises(ColumnError, match="inside the folder of the shards"):
        pack_shards(shards, shards / "packs", max_length=64)
    kind = pa.schema([("input_ids", pa.list_(pa.int32()))])
    pq.write_table(kind.empty_table(), tmp_path / "empty.parquet")
    with pytest.raises(ColumnError, match="hold no document"):
        pack_shards(tmp_path / "empty.parquet", tmp_path / "packs", max_length=64)
    (tmp_path / "text.parquet").write_text("not parquet at all")
    with pytest.raises(ColumnError, match="is no parquet file"):
        pack_shards(tmp_path / "text.parquet", tmp_path / "packs", max_length=64)
    with pytest.raises(PlanningError, match="on_overlong"):
        pack_shards(shard, tmp_path / "packs", max_length=64, on_overlong="loose")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ColumnError, match="never overwritten"):
        pack_shards(shard, tmp_path / "mine", max_length=64, force=True)
    other = pa.table({"input_ids": pa.array([[1, 2]], pa.list_(pa.int32()))})
    pq.write_table(other, tmp_path / "other.parquet")
    with pytest.raises(ColumnError, match=r"other\.parquet .* has the columns"):
        pack_shards([shard, tmp_path / "other.parquet"], tmp_path / "packs", max_length=64)
    assert not (tmp_path / "packs").exists()


def test_a_shard_that_changed_since_an_unfinished_run_is_noticed(shards, tmp_path):
    shard = tmp_path / "0.parquet"
    write_shard(shard, 0, np.random.default_rng(1))
    with pytest.raises(PlanningError, match="fits in no pack"):
        pack_shards(shard, tmp_path / "packs", max_length=32)
    write_shard(shard, 0, np.random.default_rng(2), longest=30)
    with pytest.raises(ColumnError, match="changed since"):
        pack_shards(shard, tmp_path / "packs", max_length=32)
    result = pack_shards(shard, tmp_path / "packs", max_length=32, force=True)
    assert result.documents_kept == DOCUMENTS


def test_the_example_packs_all_docstrings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["ray_packing.py"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "0 dropped, 0 cut" in shown
    assert "tokens of" in shown
    packs = pq.read_table(tmp_path / "packs").column("input_ids").to_pylist()
    pieces = [bytes(ids) for pack in packs for ids in pack]
    shards = pq.read_table(tmp_path / "docstring-shards").column("input_ids").to_pylist()
    assert sum(map(len, pieces)) == sum(map(len, shards))
    assert {bytes(ids) for ids in shards if len(ids) <= 2048} <= set(pieces)


def test_without_ray_the_error_says_what_to_install(shards, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingDependencyError, match=r"hf-neat-packing\[ray\]"):
        pack_shards(shards, tmp_path / "packs", max_length=64)
