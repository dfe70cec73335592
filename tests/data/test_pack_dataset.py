"""`pack_dataset`: a view over Arrow offsets that gives every document whole, once, unchanged."""

import pickle
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_neat_packing.dataset import PackedDataset, pack_dataset
from hf_neat_packing.errors import ColumnError, PlanningError


def make_documents(lengths, seed=0):
    """Documents whose every token is unique, so that any mix-up shows."""
    rng = np.random.default_rng(seed)
    first = np.concatenate(([0], np.cumsum(lengths)))
    return [
        {
            "input_ids": list(range(int(a), int(a) + int(n))),
            "labels": rng.integers(0, 1000, int(n)).tolist(),
            "token_type_ids": rng.integers(0, 2, int(n)).tolist(),
        }
        for a, n in zip(first, lengths, strict=False)
    ]


def random_lengths(count, high=20, seed=0):
    return np.random.default_rng(seed).integers(1, high, count)


def documents_of(packs):
    """Every document of every pack as plain lists, sorted by its first token."""
    found = []
    for pack in packs:
        names = list(pack)
        for values in zip(*pack.values(), strict=True):
            found.append({n: np.asarray(v).tolist() for n, v in zip(names, values, strict=True)})
    return sorted(found, key=lambda document: document["input_ids"])


@pytest.mark.parametrize("strategy", ["best_fit", "bfd", "sequential"])
def test_every_document_is_in_the_packs_once_with_all_its_columns(strategy):
    documents = make_documents(random_lengths(200))
    view = pack_dataset(Dataset.from_list(documents), max_length=64, strategy=strategy)
    packs = list(view)
    assert documents_of(packs) == documents
    assert all(sum(map(len, pack["input_ids"])) <= 64 for pack in packs)
    assert view.report.to_dict()
    assert view.column_names == ["input_ids", "labels", "token_type_ids"]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    chunk=st.integers(1, 7),
    large=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_chunking_and_any_shuffle_gives_the_same_documents(lengths, chunk, large, seed):
    documents = make_documents(lengths)
    kind = pa.large_list(pa.int64()) if large else pa.list_(pa.int64())
    columns = {
        name: pa.chunked_array(
            [
                pa.array([d[name] for d in documents[a : a + chunk]], type=kind)
                for a in range(0, len(documents), chunk)
            ]
        )
        for name in documents[0]
    }
    dataset = Dataset(pa.table(columns)).shuffle(seed=seed)
    view = pack_dataset(dataset, max_length=12)
    kept = [document for document in documents if document["input_ids"]]
    assert documents_of(view) == kept
    assert documents_of(view.materialize()) == kept


def test_select_filter_slice_and_concatenation_are_read_in_their_own_order():
    documents = make_documents(random_lengths(60))
    dataset = Dataset.from_list(documents)
    joined = datasets.concatenate_datasets(
        [dataset.select(range(10, 30)), dataset.select([5, 3, 59]), dataset.shuffle(seed=1).take(0)]
    )
    expected = [*documents[10:30], documents[5], documents[3], documents[59]]
    view = pack_dataset(joined, max_length=40, strategy="sequential")
    read = [ids.tolist() for pack in view for ids in pack["input_ids"]]
    assert read == [document["input_ids"] for document in expected]
    odd = dataset.filter(lambda d: len(d["input_ids"]) % 2 == 1)
    kept = [d for d in documents if len(d["input_ids"]) % 2 == 1]
    assert documents_of(pack_dataset(odd, max_length=40)) == kept


def test_a_column_added_later_has_its_own_chunks():
    documents = make_documents(random_lengths(30))
    dataset = datasets.concatenate_datasets(
        [Dataset.from_list(documents[:13]), Dataset.from_list(documents[13:])]
    )
    extra = [[i] * len(d["input_ids"]) for i, d in enumerate(documents)]
    dataset = dataset.add_column("mm_token_type_ids", extra)
    read = documents_of(pack_dataset(dataset, max_length=32))
    assert [d.pop("mm_token_type_ids") for d in read] == extra
    assert read == documents


def test_the_same_seed_gives_the_same_packs_and_another_epoch_gives_others():
    dataset = Dataset.from_list(make_documents(random_lengths(300)))
    first, again = (pack_dataset(dataset, max_length=64, seed=3) for _ in range(2))
    assert first.plan == again.plan
    later = first.with_epoch(1)
    assert later.plan != first.plan
    assert later.plan == pack_dataset(dataset, max_length=64, seed=4).plan
    assert documents_of(later) == documents_of(first)


@pytest.mark.parametrize(
    ("policy", "pieces"),
    [
        ("truncate", [[0, 1, 2, 3, 4], [7, 8], [9, 10, 11, 12], [13], [14, 15, 16]]),
        ("drop", [[7, 8], [9, 10, 11, 12], [13], [14, 15, 16]]),
        ("split", [[0, 1, 2, 3, 4], [5, 6], [7, 8], [9, 10, 11, 12], [13], [14, 15, 16]]),
    ],
)
def test_c38_overlong_documents_are_cut_split_or_dropped_as_asked(policy, pieces):
    dataset = Dataset.from_list(make_documents([7, 2, 4, 1, 3]))
    dataset = dataset.add_column("position_ids", [list(range(n)) for n in (7, 2, 4, 1, 3)])
    view = pack_dataset(dataset, max_length=5, on_overlong=policy)
    documents = documents_of(view)
    assert [d["input_ids"] for d in documents] == pieces
    assert [d["position_ids"] for d in documents] == [list(range(len(p))) for p in pieces]
    assert documents_of(view.materialize()) == documents


def test_c38_left_truncation_keeps_the_end_and_restarts_positions():
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "position_ids": [[0, 1, 2, 3]]})
    view = pack_dataset(dataset, max_length=3, on_overlong="truncate", truncate_side="left")
    assert documents_of(view) == [{"input_ids": [2, 3, 4], "position_ids": [0, 1, 2]}]


def test_c38_an_overlong_document_is_an_error_unless_a_policy_is_chosen():
    dataset = Dataset.from_list(make_documents([7, 2]))
    with pytest.raises(PlanningError, match=r"document 0 has 7 tokens and max_length is 5"):
        pack_dataset(dataset, max_length=5)


def test_c40_empty_documents_are_counted_and_an_empty_set_keeps_its_schema():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4], [], []]})
    view = pack_dataset(dataset, max_length=8)
    assert [d["input_ids"] for d in documents_of(view)] == [[1, 2], [3, 4]]
    assert view.plan.accounting.dropped_empty == 2
    for rows in ([[], []], []):
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
        empty = pack_dataset(
            Dataset.from_dict({"input_ids": rows}, features=features), max_length=8
        )
        assert len(empty) == 0
        assert list(empty) == []
        written = empty.materialize()
        assert written.num_rows == 0
        assert written.features == empty.features
        assert str(written.features["input_ids"]) == "List(List(Value('int32')))"


def test_c44_an_evaluation_set_smaller_than_a_pack_is_one_pack():
    splits = DatasetDict(
        train=Dataset.from_list(make_documents(random_lengths(50))),
        validation=Dataset.from_list(make_documents([3])),
    )
    views = pack_dataset(splits, max_length=64)
    assert set(views) == {"train", "validation"}
    assert len(views["validation"]) == 1
    assert views["validation"][0]["input_ids"][0].tolist() == [0, 1, 2]
    written = pack_dataset(splits, max_length=64, materialize=True)
    assert isinstance(written, DatasetDict)
    assert written["validation"][0]["input_ids"] == [[0, 1, 2]]


def test_tokens_are_read_without_copying():
    tokens = pa.array(np.arange(10))
    column = pa.ListArray.from_arrays(pa.array([0, 4, 10], pa.int32()), tokens)
    dataset = Dataset(pa.table({"input_ids": column}))
    view = pack_dataset(dataset, max_length=16, seed=None)
    stored = dataset.data.table.column("input_ids").chunk(0).values.to_numpy()
    read = view[0]["input_ids"]
    assert all(np.shares_memory(stored, document) for document in read)
    assert not any(document.flags.writeable for document in read)


def test_booleans_are_read_as_booleans():
    masks = [[True, False, True], [False], [True, True]]
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]], "loss_mask": masks})
    view = pack_dataset(dataset, max_length=4, columns={"loss_mask": "token"})
    assert [d["loss_mask"] for d in documents_of(view)] == masks
    assert documents_of(view.materialize()) == documents_of(view)


def test_fixed_size_lists_may_be_cut():
    features = datasets.Features(
        {"input_ids": datasets.Sequence(datasets.Value("int64"), length=4)}
    )
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    dataset = Dataset.from_dict({"input_ids": rows}, features=features).select(range(1, 3))
    view = pack_dataset(dataset, max_length=3, on_overlong="split")
    expected = [[5, 6, 7], [8], [9, 10, 11], [12]]
    assert [d["input_ids"] for d in documents_of(view)] == expected
    assert [d["input_ids"] for d in documents_of(view.materialize())] == expected


def test_a_document_column_gives_one_value_per_document_and_integer_labels_are_one():
    dataset = Dataset.from_dict(
        {
            "input_ids": [[0, 1], [2], [3, 4, 5]],
            "labels": [7, 8, 9],
            "source": ["a", "b", "c"],
        }
    )
    view = pack_dataset(dataset, max_length=4, columns={"source": "document"})
    found = documents_of(view)
    assert [(d["labels"], d["source"]) for d in found] == [(7, "a"), (8, "b"), (9, "c")]
    assert documents_of(view.materialize()) == found


def test_ignored_columns_are_left_out_and_unknown_ones_refused():
    dataset = Dataset.from_dict({"input_ids": [[1]], "text": ["x"]})
    with pytest.raises(ColumnError, match=r"\['text'\]"):
        pack_dataset(dataset, max_length=4)
    view = pack_dataset(dataset, max_length=4, columns={"text": "ignore"})
    assert list(view[0]) == view.column_names == ["input_ids"]
    hidden = pack_dataset(dataset.with_format("torch", columns=["input_ids"]), max_length=4)
    assert hidden.column_names == ["input_ids"]


def test_c26_columns_that_disagree_are_refused_by_name_document_and_lengths():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5]], "labels": [[1, 2], [3, 4]]})
    with pytest.raises(ColumnError, match=r"'labels' of document 1 has length 2 .* length 3"):
        pack_dataset(dataset, max_length=8)
    swapped = dataset.select([1, 0])
    with pytest.raises(ColumnError, match=r"'labels' of document 0 has length 2 .* length 3"):
        pack_dataset(swapped, max_length=8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], [2, None], [3]], r"'input_ids' of row 1 holds a null"),
        ([[1], [2], None], r"'input_ids' of row 2 has no value"),
        ([[[1], [2]]], "what a packed set looks like"),
        ([["a"]], "one number per token"),
        ([[]], None),
    ],
)
def test_nulls_nesting_and_text_are_refused_by_name(rows, message):
    if message is None:
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
        assert (
            len(pack_dataset(Dataset.from_dict({"input_ids": rows}, features), max_length=4)) == 0
        )
        return
    with pytest.raises(ColumnError, match=message):
        pack_dataset(Dataset.from_dict({"input_ids": rows}), max_length=4)


def test_a_null_outside_the_selected_rows_does_no_harm():
    dataset = Dataset.from_dict({"input_ids": [[1, None], [2, 3], [4]]}).select(range(1, 3))
    view = pack_dataset(dataset, max_length=4)
    assert [d["input_ids"] for d in documents_of(view)] == [[2, 3], [4]]


def test_a_set_that_is_packed_already_or_has_no_tokens_is_refused():
    packed = pack_dataset(Dataset.from_list(make_documents([3, 2])), max_length=8, materialize=True)
    with pytest.raises(ColumnError, match="packed set"):
        pack_dataset(packed, max_length=8)
    flat = Dataset.from_dict({"input_ids": [[1, 2, 3]], "seq_lengths": [[1, 2]]})
    with pytest.raises(ColumnError, match="nest_flat_packs"):
        pack_dataset(flat, max_length=8)
    with pytest.raises(ColumnError, match="Tokenize first"):
        pack_dataset(Dataset.from_dict({"label": [1]}), max_length=8)
    with pytest.raises(ColumnError, match="from_list"):
        pack_dataset([{"input_ids": [1]}], max_length=8)
    moving = Dataset.from_list(make_documents([3])).with_transform(lambda batch: batch)
    with pytest.raises(ColumnError, match="transform"):
        pack_dataset(moving, max_length=8)


def test_c61_media_follow_their_documents_and_are_never_cut():
    grids = [[[1, 2, 2]], None, [[1, 2, 2], [1, 1, 1]]]
    pixels = [np.full((4, 3), 1.0), None, np.full((5, 3), 3.0)]
    dataset = Dataset.from_dict(
        {
            "input_ids": [[0] * 6, [1] * 9, [2] * 7],
            "pixel_values": [p if p is None else p.tolist() for p in pixels],
            "image_grid_thw": grids,
        }
    )
    view = pack_dataset(dataset, max_length=32, seed=None)
    pack = view[0]
    for position, ids in enumerate(pack["input_ids"]):
        document = int(ids[0])
        found = pack["pixel_values"][position]
        if pixels[document] is None:
            assert found is None
        else:
            np.testing.assert_array_equal(found, pixels[document])
            assert np.asarray(pack["image_grid_thw"][position]).tolist() == grids[document]
    text_is_cut = pack_dataset(dataset, max_length=8, on_overlong="truncate")
    assert text_is_cut.plan.accounting.documents_cut == 1
    for policy in ("truncate", "split"):
        with pytest.raises(
            ColumnError, match=r"Document 2 has 7 tokens and media in 'pixel_values'"
        ):
            pack_dataset(dataset, max_length=6, on_overlong=policy)
    assert len(pack_dataset(dataset, max_length=6, on_overlong="drop")) == 1


def test_images_are_decoded_only_when_a_pack_is_read():
    image = pytest.importorskip("PIL.Image")
    pictures = [image.new("RGB", (2, 2), (shade, 0, 0)) for shade in (10, 20)]
    dataset = Dataset.from_dict(
        {"input_ids": [[0, 1], [2]], "images": pictures},
        features=datasets.Features(
            {"input_ids": datasets.List(datasets.Value("int64")), "images": datasets.Image()}
        ),
    )
    view = pack_dataset(dataset, max_length=4, seed=None)
    shades = {int(i[0]): p.getpixel((0, 0))[0] for i, p in zip(*view[0].values(), strict=True)}
    assert shades == {0: 10, 2: 20}
    written = view.materialize()
    assert written.features["images"] == datasets.List(datasets.Image())
    assert written[0]["images"][0].getpixel((0, 0))[0] in (10, 20)


def test_a_view_behaves_as_a_map_style_data_set():
    view = pack_dataset(Dataset.from_list(make_documents(random_lengths(40))), max_length=32)
    assert documents_of([view[-1]]) == documents_of([view[len(view) - 1]])
    assert documents_of([view[np.int64(0)]]) == documents_of(view.__getitems__([0]))
    with pytest.raises(IndexError, match=f"{len(view)} packs"):
        view[len(view)]
    with pytest.raises(TypeError):
        view["input_ids"]
    assert "PackedDataset(packs=" in repr(view)


@pytest.mark.parametrize("method", ["map", "shuffle", "remove_columns", "with_format"])
def test_methods_of_a_data_set_that_would_lose_the_plan_say_what_to_write(method):
    view = pack_dataset(Dataset.from_list(make_documents([3])), max_length=8)
    assert not hasattr(view, method)
    with pytest.raises(AttributeError, match=rf"view.materialize\(\).{method}"):
        getattr(view, method)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = view.no_such_thing


def read_whole(batch):
    return [{name: [v.tolist() for v in values] for name, values in p.items()} for p in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_reads_every_pack_once(workers, tmp_path):
    Dataset.from_list(make_documents(random_lengths(100))).save_to_disk(tmp_path / "set")
    view = pack_dataset(datasets.load_from_disk(tmp_path / "set"), max_length=64)
    loader = DataLoader(view, batch_size=4, num_workers=workers, collate_fn=read_whole)
    read = [pack for batch in loader for pack in batch]
    assert read == read_whole(view)


def test_a_pickle_of_a_view_over_a_file_holds_the_plan_and_no_tokens(tmp_path):
    lengths = np.full(50, 2000)
    Dataset.from_list(make_documents(lengths)).save_to_disk(tmp_path / "set")
    dataset = datasets.load_from_disk(tmp_path / "set").shuffle(seed=0)
    view = pack_dataset(dataset, max_length=4096)
    token_bytes = dataset.data.nbytes
    data = pickle.dumps(view)
    assert len(data) < token_bytes / 50
    again = pickle.loads(data)
    assert isinstance(again, PackedDataset)
    assert read_whole(again) == read_whole(view)


LATE = """
import sys
import hf_neat_packing.dataset, hf_neat_packing.columns, hf_neat_packing.dataset.streams
from hf_neat_packing.errors import MissingDependencyError
imported = lambda: [name for name in ("datasets", "pyarrow") if name in sys.modules]
assert imported() == [], imported()
sys.modules["datasets"] = None
try:
    hf_neat_packing.dataset.pack_dataset(None, max_length=4)
except MissingDependencyError as error:
    assert "pip install 'hf-neat-packing[datasets]'" in str(error)
else:
    raise SystemExit("no error without datasets")
import pyarrow
assert imported() == ["datasets", "pyarrow"], "the check above cannot fail"
"""


def test_datasets_is_imported_late_and_its_absence_says_what_to_install():
    subprocess.run([sys.executable, "-c", LATE], check=True)


def masked_documents(kind="int64", labels=False):
    kinds = {"input_ids": kind, "completion_mask": "int8"}
    rows = {
        "input_ids": [[1, 2, 3, 4], [5, 6], [7, 8, 9]], "completion_mask": [[0, 0, 1, 1], [1, 1], [0, 1, 0]]
    }  # fmt: skip
    if labels:
        kinds["labels"] = "int64"
        rows["labels"] = [[-100, 2, 3, -100], [5, -100], [7, 8, 9]]
    features = {name: datasets.Sequence(datasets.Value(kind)) for name, kind in kinds.items()}
    return Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.mark.parametrize("kind", ["int64", "uint16"])
@pytest.mark.parametrize("written", [False, True])
def test_masks_of_trained_tokens_become_labels(kind, written):
    view = pack_dataset(masked_documents(kind), max_length=6, materialize=written)
    assert view.column_names == ["input_ids", "labels"]
    assert documents_of(view) == [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"input_ids": [7, 8, 9], "labels": [-100, 8, -100]},
    ]


def test_masks_cut_labels_that_are_there_and_go_with_the_pieces_of_a_document():
    view = pack_dataset(masked_documents(labels=True), max_length=3, on_overlong="split")
    assert documents_of(view) == [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [4], "labels": [-100]},
        {"input_ids": [5, 6], "labels": [5, -100]},
        {"input_ids": [7, 8, 9], "labels": [-100, 8, -100]},
    ]
    again = pickle.loads(pickle.dumps(view)).with_epoch(1)
    assert documents_of(again) == documents_of(view)
    shuffled = pack_dataset(masked_documents(labels=True).shuffle(seed=1), max_length=4)
    assert documents_of(shuffled.materialize()) == documents_of(shuffled)


def test_masks_of_another_length_and_declared_ones():
    broken = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[1, 1]]})
    with pytest.raises(ColumnError, match="loss_mask"):
        pack_dataset(broken, max_length=4)
    declared = pack_dataset(masked_documents(), max_length=4, columns={"completion_mask": "token"})
    assert declared.column_names == ["input_ids", "completion_mask"]
    ignored = pack_dataset(masked_documents(), max_length=4, columns={"completion_mask": "ignore"})
    assert ignored.column_names == ["input_ids"]
