"""The batch that the collator makes, key by key, and what it refuses."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from exactness import parity_excess, spans
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_ids, tiny_model
from transformers import DataCollatorWithFlattening, LlamaForSequenceClassification

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.contract import PackingCapabilities
from hf_neat_packing.documents import get_seqlens_in_batch
from hf_neat_packing.errors import BoundaryError, ColumnError, ContractError
from hf_neat_packing.positions import seq_idx_from_document_map

VARLEN_KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
MAIN_KEYS = {"input_ids", "labels", "position_ids", "_packed_seq_ids"}


def documents(*lengths, **extra):
    start = 10
    made = []
    for length in lengths:
        made.append({"input_ids": list(range(start, start + length)), **extra})
        start += 10
    return made


def nested(*lengths):
    return {"input_ids": [d["input_ids"] for d in documents(*lengths)]}


def test_c23_c52_one_flat_row_with_everything_a_varlen_model_reads():
    batch = DataCollatorForNeatPacking()(documents(3, 5))
    assert set(batch) == MAIN_KEYS | VARLEN_KEYS
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22, 23, 24]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21, 22, 23, 24]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2]]
    for side in "qk":
        offsets = batch[f"cu_seq_lens_{side}"]
        assert offsets.tolist() == [0, 3, 8]
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()
        assert type(batch[f"max_length_{side}"]) is int
        assert batch[f"max_length_{side}"] == 5


def test_it_says_what_the_flattening_collator_says():
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    ours = DataCollatorForNeatPacking(return_seq_idx=True)
    features = documents(3, 5, 1)
    for feature in features:
        feature["labels"] = [-100, *feature["input_ids"][1:]]
    expected, got = theirs([dict(f) for f in features]), ours(features)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name
            assert got[name].dtype == value.dtype
        else:
            assert got[name] == value
    assert isinstance(ours, DataCollatorWithFlattening)


@pytest.mark.parametrize(
    "features",
    [[nested(3, 2), nested(4)], [documents(3, 2), documents(4)], documents(3, 2, 4)],
    ids=["packs", "lists of documents", "documents"],
)
def test_documents_packs_and_lists_of_documents_are_one_thing(features):
    batch = DataCollatorForNeatPacking()(features)
    assert get_seqlens_in_batch(batch["_packed_seq_ids"]).tolist() == [3, 2, 4]


def test_given_labels_are_kept_and_only_the_first_of_each_document_is_masked():
    features = [
        {"input_ids": [1, 2, 3], "labels": [7, -100, 9]},
        {"input_ids": [4, 5], "labels": [8, 8]},
    ]
    batch = DataCollatorForNeatPacking()(features)
    assert batch["labels"].tolist() == [[-100, -100, 9, -100, 8]]
    assert features[0]["labels"] == [7, -100, 9], "the features are not changed"


def test_c23_labels_that_are_shifted_already_are_not_touched():
    features = [
        {"input_ids": [1, 2, 3], "shift_labels": [2, 3, 9]}, {"input_ids": [4, 5], "shift_labels": [5, 9]}
    ]  # fmt: skip
    batch = DataCollatorForNeatPacking()(features)
    assert batch["shift_labels"].tolist() == [[2, 3, 9, 5, 9]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_c26_per_token_columns_keep_their_values_and_masks_become_labels(kind):
    features = [
        {
            "input_ids": [1, 2, 3], "labels": [1, 2, 3], "completion_mask": [0, 1, 1],
            "assistant_masks": [1, 1, 0], "token_type_ids": [5, 6, 7],
        },
        {
            "input_ids": [4, 5], "labels": [4, 5], "completion_mask": [1, 1],
            "assistant_masks": [1, 1], "token_type_ids": [8, 9],
        },
    ]  # fmt: skip
    features = [{name: kind(values) for name, values in f.items()} for f in features]
    batch = DataCollatorForNeatPacking(pad_to_multiple_of=8)(features)
    assert batch["token_type_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, -100, -100, 5, -100, -100, -100]]
    assert "completion_mask" not in batch
    assert all(batch[name].shape == (1, 8) for name in (*MAIN_KEYS, "token_type_ids"))
    features[1]["completion_mask"] = kind([1])
    with pytest.raises(ColumnError) as error:
        DataCollatorForNeatPacking()(features)
    for word in ("completion_mask", "document 1", "length 1", "length 2"):
        assert word in str(error.value)


def test_a_column_without_a_rule_is_an_error_and_a_declared_one_is_packed():
    features = documents(2, 3)
    for feature in features:
        feature["reward_per_token"] = [0.5] * len(feature["input_ids"])
    with pytest.raises(ColumnError, match="reward_per_token"):
        DataCollatorForNeatPacking()(features)
    batch = DataCollatorForNeatPacking(columns={"reward_per_token": "token"})(features)
    assert batch["reward_per_token"].tolist() == [[0.5] * 5]


def test_c12_tokens_that_a_mask_calls_padding_are_not_packed():
    features = [
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        *documents(2, attention_mask=[1, 1]),
    ]
    batch = DataCollatorForNeatPacking()(features)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert "attention_mask" not in batch


def test_c28_integer_labels_are_one_per_document():
    features = [{"input_ids": [5] * n, "labels": label} for n, label in ((3, 0), (1, 1), (4, 1))]
    batch = DataCollatorForNeatPacking()(features)
    assert batch["labels"].tolist() == [0, 1, 1]


def test_labels_of_losses_that_do_not_shift_are_left_alone():
    features = [{"input_ids": [5, 6, 7], "labels": [7, -100, 9]}]
    assert DataCollatorForNeatPacking(tiny_model("bert"))(features)["labels"].tolist() == [
        [7, -100, 9]
    ]
    assert "labels" not in DataCollatorForNeatPacking(tiny_model("bert"))(documents(3))
    assert DataCollatorForNeatPacking(tiny_model("llama"))(features)["labels"].tolist() == [
        [-100, -100, 9]
    ]


@pytest.mark.parametrize(
    ("lengths", "offsets", "number"),
    [([3, 2], [0, 3, 5, 8], 2), ([5], [0, 5, 8], 1), ([4, 4], [0, 4, 8], 2)],
)
def test_c20_c35_a_padded_tail_is_one_segment_and_everything_is_padded(lengths, offsets, number):
    batch = DataCollatorForNeatPacking(pad_to_multiple_of=8, pad_token_id=96)(documents(*lengths))
    assert batch["cu_seq_lens_q"].tolist() == offsets
    assert int(batch["_packed_seq_ids"].max()) == number
    tail = slice(sum(lengths), 8)
    assert (batch["input_ids"][0, tail] == 96).all()
    assert (batch["labels"][0, tail] == -100).all()
    assert (batch["_packed_seq_ids"][0, tail] == 0).all()
    assert all(batch[name].shape == (1, 8) for name in MAIN_KEYS)


def test_fixed_rows_hold_one_pack_each():
    batch = DataCollatorForNeatPacking(row_length=8)([nested(3, 5), nested(2, 2, 1)])
    assert batch["_packed_seq_ids"].tolist() == [[1] * 3 + [2] * 5, [1, 1, 2, 2, 3, 0, 0, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8, 10, 12, 13, 16]
    assert batch["position_ids"][1].tolist() == [0, 1, 0, 1, 0, 0, 1, 2]


def test_single_documents_are_packed_into_as_few_fixed_rows_as_they_need():
    batch = DataCollatorForNeatPacking(row_length=8)(documents(5, 3, 4, 4))
    assert batch["input_ids"].shape == (2, 8)
    assert sorted(get_seqlens_in_batch(batch["_packed_seq_ids"]).tolist()) == [3, 4, 4, 5]
    with pytest.raises(ColumnError, match="9 tokens but row_length is 8"):
        DataCollatorForNeatPacking(row_length=8)([nested(5, 4)])


def test_empty_documents_are_left_out_and_counted():
    with pytest.warns(UserWarning, match="1 empty document"):
        batch = DataCollatorForNeatPacking()([*documents(3), {"input_ids": []}, *documents(4)])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7]
    with pytest.raises(ColumnError, match="Every document"):
        DataCollatorForNeatPacking()([{"input_ids": []}])
    assert DataCollatorForNeatPacking()([]) == {}


def test_positions_start_where_the_model_counts_from():
    assert DataCollatorForNeatPacking(position_ids_start=2)(documents(3, 2))[
        "position_ids"
    ].tolist() == [[2, 3, 4, 2, 3]]


def test_positions_that_contradict_the_boundaries_are_refused():
    features = [
        {"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]},
        {"input_ids": [4, 5], "position_ids": [3, 4]},
    ]
    with pytest.raises(ColumnError, match="position_ids"):
        DataCollatorForNeatPacking()(features)
    features[1]["position_ids"] = [0, 1]
    assert DataCollatorForNeatPacking()(features)["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_what_is_no_document_is_named():
    with pytest.raises(ColumnError, match="input_ids"):
        DataCollatorForNeatPacking()([{"text": "hello"}])
    with pytest.raises(ColumnError, match="Pack 0 holds 2 documents"):
        DataCollatorForNeatPacking()([{"input_ids": [[1, 2], [3]], "labels": [[1, 2]]}])


def test_options_that_lose_boundaries_are_refused():
    with pytest.raises(ContractError):
        DataCollatorForNeatPacking(return_flash_attn_kwargs=False)
    with pytest.raises(ContractError):
        DataCollatorForNeatPacking(return_tensors="np")
    with pytest.raises(ContractError):
        DataCollatorForNeatPacking(row_length=8, rows="flat")
    with pytest.raises(ContractError):
        DataCollatorForNeatPacking(
            tiny_model("llama"), contract=PackingCapabilities("block_causal")
        )


@pytest.mark.parametrize("key", ["neat_varlen", "sdpa", "eager"])
def test_c08_the_form_follows_the_key_and_the_packed_row_is_exact(key):
    lengths = [7, 1, 12, 5]
    model = tiny_model("llama", key)
    ids = random_ids(lengths)
    batch = DataCollatorForNeatPacking(model)(
        [{"input_ids": ids[0, s].tolist()} for s in spans(lengths)]
    )
    mask = batch.get("attention_mask")
    if key == "neat_varlen":
        assert mask is None
        assert set(batch) >= VARLEN_KEYS
    else:
        assert mask.dtype == (torch.bool if key == "sdpa" else torch.float32)
        assert not VARLEN_KEYS & set(batch)
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    alone = tiny_model("llama", "eager")
    assert parity_excess(model, alone, ids, lengths, inputs) <= 1
    inputs.pop("attention_mask", None)
    inputs = {"position_ids": torch.arange(sum(lengths))[None]}
    assert parity_excess(model, alone, ids, lengths, inputs) > 100


@pytest.mark.parametrize("key", ["neat_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama4", "bert", "modernbert"])
def test_windows_chunks_and_both_directions_are_exact_under_every_key(name, key):
    lengths = [6, 7, 1, 9]
    model = tiny_model(name, key)
    ids = random_ids(lengths)
    batch = DataCollatorForNeatPacking(model, pad_to_multiple_of=8)(
        [{"input_ids": ids[0, s].tolist()} for s in spans(lengths)]
    )
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    assert parity_excess(model, tiny_model(name, "eager"), ids, lengths, inputs) <= 1


def test_packs_get_rows_of_their_own_under_a_4d_mask():
    collator = DataCollatorForNeatPacking(tiny_model("llama", "sdpa"))
    batch = collator([nested(3, 2), nested(4)])
    assert batch["attention_mask"].shape == (2, 1, 5, 5)
    assert collator(documents(3, 2, 4))["attention_mask"].shape == (1, 1, 9, 9)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, "mixed"])
@pytest.mark.parametrize("width", [np.int32, np.int64, np.uint8, np.bool_])
def test_any_form_and_any_whole_number_type_of_tokens_gives_one_batch(kind, width):
    plain = documents(3, 5, 1)
    expected = DataCollatorForNeatPacking(return_seq_idx=True)(plain)
    made = [np.array(d["input_ids"]).astype(width) for d in plain]
    forms = {
        list: lambda a, _: a.tolist(),
        np.array: lambda a, _: a,
        torch.tensor: lambda a, _: torch.from_numpy(a),
        "mixed": lambda a, i: (a, torch.from_numpy(a), a.tolist())[i],
    }
    features = [
        {"input_ids": forms[kind](a, i), "labels": forms[kind](a, i)} for i, a in enumerate(made)
    ]
    kept = [[np.asarray(v).tolist() for v in f.values()] for f in features]
    batch = DataCollatorForNeatPacking(return_seq_idx=True)(features)
    for name, value in expected.items():
        if name in ("input_ids", "labels"):
            assert batch[name].dtype == torch.int64
            tokens = np.concatenate(made).astype(np.int64)
            if name == "labels":
                tokens[[0, 3, 8]] = -100
            assert batch[name].tolist() == [tokens.tolist()]
        else:
            assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value))
    assert [[np.asarray(v).tolist() for v in f.values()] for f in features] == kept
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_numbers_that_no_int64_holds_are_refused_and_floats_stay_floats():
    with pytest.raises(OverflowError):
        DataCollatorForNeatPacking()([{"input_ids": [1, 2**63]}])
    features = [{"input_ids": [1, 2], "weight": [1, 0.5]}, {"input_ids": [3], "weight": [2]}]
    batch = DataCollatorForNeatPacking(columns={"weight": "token"})(features)
    assert batch["weight"].tolist() == [[1.0, 0.5, 2.0]]


def test_a_document_of_another_form_among_the_usual_ones_is_still_looked_at():
    usual = {"input_ids": np.arange(3)}
    for odd, words in [
        ({"labels": np.arange(3)}, "Feature 1 has no `input_ids`"),
        ({"input_ids": np.arange(3), "labels": np.arange(3)}, "'labels'"),
        ({"input_ids": None}, "document 1 has no value"),
        ({"input_ids": 3}, "object of type 'int'"),
        ("text", "Feature 1 has no `input_ids`"),
    ]:
        with pytest.raises((ColumnError, TypeError), match=words):
            DataCollatorForNeatPacking()([usual, odd])
    batch = DataCollatorForNeatPacking()([usual, {"input_ids": [np.arange(2), np.arange(4)]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    with pytest.raises(ColumnError, match=r"shape \[2, 2\]"):
        DataCollatorForNeatPacking(columns={"extra": "token"})(
            [{"input_ids": torch.arange(2), "extra": torch.zeros(2, 2)}]
        )


def test_it_pickles_without_the_model():
    model = tiny_model("llama")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    data = pickle.dumps(DataCollatorForNeatPacking(model))
    assert len(data) < min(20_000, weights)
    batch = pickle.loads(data)(documents(3, 5))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8]


def test_c24_the_number_of_targets_does_not_depend_on_the_packing():
    def targets(features):
        labels = DataCollatorForNeatPacking()(features)["labels"]
        return int((labels[:, 1:] != -100).sum())

    assert targets(documents(5, 3, 4, 2)) == 10
    assert sum(targets(f) for f in (documents(5, 3), documents(4), documents(2))) == 10


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([None, 1, 8]),
    st.booleans(),
)
def test_every_token_is_in_the_batch_once_in_document_order(rows, multiple, fixed):
    counter = iter(range(1, 1000))
    packs = [{"input_ids": [[next(counter) for _ in range(n)] for n in row]} for row in rows]
    collator = DataCollatorForNeatPacking(
        pad_to_multiple_of=multiple, row_length=max(map(sum, rows)) if fixed else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collator(packs)
    real = batch["_packed_seq_ids"] != 0
    assert batch["input_ids"][real].tolist() == list(range(1, 1 + sum(map(sum, rows))))
    flat = [n for row in rows for n in row]
    assert get_seqlens_in_batch(batch["_packed_seq_ids"]).tolist() == flat
    assert int((batch["labels"] != -100).sum()) == sum(n - 1 for n in flat)
    assert int(batch["cu_seq_lens_q"][-1]) == batch["input_ids"].numel()


FORMS = {"lists": np.ndarray.tolist, "arrays": np.asarray, "tensors": torch.from_numpy}


def columns_of_all_kinds(lengths):
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(1, 90, length),
            "labels": rng.integers(1, 90, length),
            "weight": rng.integers(0, 9, length) / 4,
            "attention_mask": np.ones(length, dtype=np.int64),
        }
        for length in lengths
    ]


def same(batch, other):
    return list(batch) == list(other) and all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in batch.items()
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.sampled_from([{}, {"row_length": 9}, {"pad_to_multiple_of": 8}, {"rows": "packs"}]),
    st.integers(0, 2),
)
def test_lists_arrays_and_tensors_give_one_batch_bit_for_bit(lengths, options, start):
    collator = DataCollatorForNeatPacking(
        columns={"weight": "token"}, return_seq_idx=True, position_ids_start=start, **options
    )
    made = columns_of_all_kinds(lengths)
    expected = collator([{c: v.tolist() for c, v in d.items()} for d in made])
    assert torch.equal(expected["seq_idx"], seq_idx_from_document_map(expected["_packed_seq_ids"]))
    for form in FORMS.values():
        assert same(collator([{c: form(v) for c, v in d.items()} for d in made]), expected)
    turns = iter(list(FORMS.values()) * len(made) * 2)
    assert same(collator([{c: next(turns)(v) for c, v in d.items()} for d in made]), expected)
    made[-1]["weight"][-1] += 1
    assert not same(collator(made), expected)


def test_a_mask_of_ones_changes_nothing_and_one_zero_takes_its_token_away():
    plain, masked = documents(3, 5), documents(3, 5)
    for document in masked:
        document["attention_mask"] = [1] * len(document["input_ids"])
    collator = DataCollatorForNeatPacking()
    expected, got = collator(plain), collator(masked)
    assert all(
        torch.equal(torch.as_tensor(got[k]), torch.as_tensor(v)) for k, v in expected.items()
    )
    masked[1]["attention_mask"][2] = 0
    batch = collator(masked)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 23, 24]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7]


@pytest.mark.parametrize("rows", ["flat", "packs"])
def test_lists_without_a_document_make_no_row(rows):
    collator = DataCollatorForNeatPacking(rows=rows)
    batch = collator([[], documents(3, 2)])
    assert batch["input_ids"].shape == (1, 5)
    with pytest.raises(ColumnError, match="Every document"):
        collator([[], []])


def test_a_sequence_classifier_keeps_one_label_a_document():
    config = tiny_model("llama").config
    config.num_labels = 2
    model = LlamaForSequenceClassification(config)
    collator = DataCollatorForNeatPacking(model)
    assert collator([{"input_ids": [5, 6], "labels": 1}])["labels"].tolist() == [1]


def test_seq_idx_numbers_the_segments_of_each_row():
    collator = DataCollatorForNeatPacking(row_length=8, return_seq_idx=True)
    batch = collator([nested(3, 5), nested(2, 2, 1)])
    assert batch["seq_idx"].dtype == torch.int32
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 3, 3, 3]]
    assert torch.equal(batch["seq_idx"], seq_idx_from_document_map(batch["_packed_seq_ids"]))


@pytest.mark.parametrize(
    ("key", "layout"),
    [("eager", "additive_4d"), ("sdpa", "bool_4d"), ("flash_attention_2", "varlen")],
)
def test_the_deprecated_keyword_decides_where_nothing_else_does(key, layout):
    with pytest.warns(DeprecationWarning, match="attn_implementation"):
        collator = DataCollatorForNeatPacking(attn_implementation=key)
    assert collator.capabilities.layout == layout


def test_joined_rows_are_one_document_with_running_positions():
    batch = DataCollatorForNeatPacking(join_documents=True, row_length=8)([nested(3, 2), nested(4)])
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["position_ids"][0, :5].tolist() == [0, 1, 2, 3, 4]
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 12, 16]
    assert batch["labels"][0].tolist() == [-100, 11, 12, -100, 21, -100, -100, -100]


def test_documents_of_one_conversation_are_joined_and_are_exact():
    features = documents(3, 2, 4)
    for feature, conversation in zip(features, ["a", "a", "b"], strict=True):
        feature["conversation_id"] = conversation
    model = tiny_model("llama")
    batch = DataCollatorForNeatPacking(model, join_documents="conversation_id")(features)
    assert "conversation_id" not in batch
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 9]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    alone = tiny_model("llama", "eager")
    assert parity_excess(model, alone, batch["input_ids"], [5, 4], inputs) <= 1
    assert parity_excess(model, alone, batch["input_ids"], [3, 2, 4], inputs) > 100


def test_joining_needs_its_column_and_neighbours():
    with pytest.raises(ColumnError, match="conversation_id"):
        DataCollatorForNeatPacking(join_documents="conversation_id")(documents(3, 2))
    features = [d | {"conversation_id": c} for d, c in zip(documents(3, 2, 4), "aba", strict=True)]
    with pytest.raises(BoundaryError, match="neighbours"):
        DataCollatorForNeatPacking(join_documents="conversation_id")(features)
