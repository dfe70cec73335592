"""Packs written as nested Arrow columns hold what the view shows, and are found again."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hf_neat_packing.dataset import arrow, materialize, pack_dataset
from hf_neat_packing.dataset.arrow import ListColumn
from hf_neat_packing.planning import PackingReport


@pytest.fixture
def on_disk(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 500, n).tolist() for n in rng.integers(1, 40, 300)]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows, "label": list(range(300))})
    dataset.save_to_disk(tmp_path / "documents")
    return datasets.load_from_disk(tmp_path / "documents")


def plain(packs):
    return [{k: [np.asarray(v).tolist() for v in vs] for k, vs in p.items()} for p in packs]


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(materialize, "_TOKENS_WRITTEN", 500)
    monkeypatch.setattr(materialize, "_TOKENS_KEPT", 900)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "float32"])
@pytest.mark.parametrize("block", [1, 64, 10_000])
def test_tokens_that_are_joined_in_blocks_are_those_of_one_block(monkeypatch, dtype, block):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 500, n).astype(dtype) for n in [0, 3, *rng.integers(0, 40, 60), 0]]
    documents = pa.array(rows, pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))
    column = ListColumn("x", pa.chunked_array([documents[:9], documents[9:10], documents[10:]]))
    chosen = rng.permutation(len(rows))
    starts = np.array([len(rows[row]) // 3 for row in chosen])
    lengths = np.array([len(rows[row]) // 2 for row in chosen])
    expected = np.concatenate(
        [rows[row][a : a + n] for row, a, n in zip(chosen, starts, lengths, strict=True)]
    )
    whole = column.gather(chosen, starts, lengths)
    monkeypatch.setattr(arrow, "_JOINED_BYTES", 1)
    monkeypatch.setattr(arrow, "_BLOCK_BYTES", block)
    joined = []
    join = ListColumn._join
    monkeypatch.setattr(ListColumn, "_join", lambda *a: joined.append(1) or join(*a))
    for found in (whole, column.gather(chosen, starts, lengths)):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    assert (len(joined) > 1) == (block < 10_000)
    assert len(column.gather(chosen[:0], None, lengths[:0])) == 0


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.usefixtures("small_batches")
def test_written_packs_equal_the_view_in_any_number_of_batches_and_threads(on_disk, threads):
    view = pack_dataset(on_disk.shuffle(seed=1), max_length=64)
    written = view.materialize(num_proc=threads)
    assert len(written.data.table.column(0).chunks) > 5
    assert plain(written) == plain(view)
    assert written.features == view.features


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.usefixtures("small_batches")
def test_pieces_of_cut_documents_are_written_as_the_view_shows_them(keep, threads):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 90, 200).tolist()
    dataset = Dataset.from_dict(
        {
            "input_ids": [rng.integers(0, 500, n).tolist() for n in lengths],
            "position_ids": [list(range(n)) for n in lengths],
            "loss_mask": [rng.integers(0, 2, n).astype(bool).tolist() for n in lengths],
        }
    )
    columns = {"loss_mask": "token"}  # declared, it stays a column
    for policy, side in (("split", "right"), ("truncate", "left")):
        options = {"max_length": 40, "on_overlong": policy, "truncate_side": side}
        view = pack_dataset(dataset, columns=columns, **options)
        written = view.materialize(num_proc=threads, keep_in_memory=keep)
        assert plain(written) == plain(view)
        starts = [p[0] for pack in written["position_ids"] for p in pack]
        assert set(starts) == {0}


def test_a_set_in_memory_gives_packs_in_memory_unless_a_file_is_asked_for():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5, 6]]})
    assert pack_dataset(dataset, max_length=6, materialize=True).cache_files == []
    written = pack_dataset(dataset, max_length=6).materialize(keep_in_memory=False)
    assert len(written.cache_files) == 1
    assert sorted(written[0]["input_ids"]) == [[1, 2], [3, 4, 5, 6]]


def test_a_memory_mapped_set_is_written_beside_it_and_found_again(on_disk, monkeypatch):
    first = pack_dataset(on_disk, max_length=64, materialize=True)
    path = first.cache_files[0]["filename"]
    monkeypatch.setattr(materialize, "_batches", lambda *_, **__: pytest.fail("written twice"))
    again = pack_dataset(on_disk, max_length=64, materialize=True)
    assert again.cache_files[0]["filename"] == path
    assert again._fingerprint == first._fingerprint
    with pytest.raises(pytest.fail.Exception):
        pack_dataset(on_disk, max_length=65, materialize=True)


def test_a_write_that_fails_leaves_no_file_behind(on_disk, monkeypatch):
    view = pack_dataset(on_disk, max_length=64)

    def breaks(*_):
        raise RuntimeError("disk full")

    monkeypatch.setattr(materialize, "_batch", breaks)
    with pytest.raises(RuntimeError, match="disk full"):
        view.materialize()
    monkeypatch.undo()
    assert plain(view.materialize()) == plain(view)


def test_an_in_memory_set_is_packed_in_memory():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    written = pack_dataset(dataset, max_length=4, materialize=True)
    assert written.cache_files == []
    assert sorted(written[0]["input_ids"]) == [[1, 2], [3]]


def test_keep_in_memory_decides_where_packs_are(on_disk):
    view = pack_dataset(on_disk, max_length=64)
    assert view.materialize(keep_in_memory=True).cache_files == []
    in_memory = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2], [3]]}), max_length=4)
    written = in_memory.materialize(keep_in_memory=False)
    assert len(written.cache_files) == 1
    assert plain(written) == plain(in_memory)


def test_save_to_disk_and_parquet_keep_the_packs_and_the_report(on_disk, tmp_path):
    view = pack_dataset(on_disk, max_length=64)
    view.save_to_disk(tmp_path / "packed")
    assert plain(datasets.load_from_disk(tmp_path / "packed")) == plain(view)
    report = PackingReport.load(tmp_path / "packed" / "packing_report.json")
    assert report.to_dict() == view.report.to_dict()
    view.to_parquet(tmp_path / "packed.parquet")
    assert plain(pq.read_table(tmp_path / "packed.parquet").to_pylist()) == plain(view)
    assert plain(Dataset.from_parquet(str(tmp_path / "packed.parquet"))) == plain(view)
    report = PackingReport.load(tmp_path / "packed.report.json")
    assert report.to_dict() == view.report.to_dict()


def test_split_and_description_are_kept(on_disk):
    named = Dataset.from_dict({"input_ids": [[1]]}, split=datasets.Split.VALIDATION)
    assert pack_dataset(named, max_length=4, materialize=True).split == "validation"
