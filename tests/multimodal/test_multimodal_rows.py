"""The batch that the collator makes of documents with media, and what it refuses."""

import pickle

import numpy as np
import pytest
import torch
from tiny_vlms import (
    GRID_FAMILIES,
    IMAGE,
    PATCH_VALUES,
    gemma_image,
    gemma_text,
    text,
    tiny_vlm,
    with_images,
    with_video,
)
from vlm_exactness import parity_excess

from hf_neat_packing import DataCollatorForNeatPacking, pack_dataset
from hf_neat_packing.attention.forward import neat_varlen_attention
from hf_neat_packing.contract import VARLEN_KEYS, PackingCapabilities
from hf_neat_packing.errors import BoundaryError, ColumnError, UnsupportedModelError

MEDIA = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_c14_positions_on_every_axis_are_those_of_each_document_alone(name):
    documents = [with_images(3, [(1, 4, 4)], 2), text(4)]
    batch = DataCollatorForNeatPacking(tiny_vlm(name), pad_to_multiple_of=8)(documents)
    assert batch["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1, 2],
    ]
    assert batch["cu_seq_lens_q"].tolist() == [0, 9, 13, 16]


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_a_pickled_collator_numbers_media_as_the_model_does(name):
    model = tiny_vlm(name)
    stored = pickle.dumps(DataCollatorForNeatPacking(model))
    assert len(stored) < 20_000
    document = with_video(name, 2, (3, 4, 6), 3)
    batch = pickle.loads(stored)([document])
    inputs = {
        key: torch.tensor(document[key])[None] for key in ("input_ids", "mm_token_type_ids")
    } | {"video_grid_thw": document["video_grid_thw"]}
    if name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = document["second_per_grid_ts"]
    expected, _ = model.model.get_rope_index(**inputs)
    assert torch.equal(batch["position_ids"][1:], expected)
    assert int(expected[0].max()) > 4


def test_c61_pixels_and_grids_follow_their_documents_in_any_order():
    model = tiny_vlm("qwen2_vl")
    a = with_images(2, [(1, 4, 4)], 1, seed=1)
    b = text(5)
    c = with_images(1, [(1, 4, 4), (1, 2, 2)], 2, seed=3)
    batch = DataCollatorForNeatPacking(model)([c, b, a])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 2], [1, 4, 4]]
    assert torch.equal(batch["pixel_values"], torch.cat([c["pixel_values"], a["pixel_values"]]))
    types = [*c["mm_token_type_ids"], *[0] * 5, *a["mm_token_type_ids"]]
    assert batch["mm_token_type_ids"].tolist() == [types]


def test_c61_a_row_of_text_has_no_key_of_media():
    model, alone = tiny_vlm("qwen2_5_vl"), tiny_vlm("qwen2_5_vl", "eager")
    bare = [text(4, 1), text(3, 2)]
    empty = [
        {**bare[0], "mm_token_type_ids": [0] * 4, "pixel_values": None, "image_grid_thw": None},
        {**bare[1], "mm_token_type_ids": None, "pixel_values": [], "image_grid_thw": []},
    ]
    for documents in (bare, empty):
        batch = DataCollatorForNeatPacking(model)(documents)
        assert not MEDIA & set(batch)
        assert batch["position_ids"].tolist() == [[[0, 1, 2, 3, 0, 1, 2]]] * 4
        assert batch["cu_seq_lens_q"].tolist() == [0, 4, 7]
        assert parity_excess(model, alone, bare, batch) <= 1


def cut(document, tokens):
    """What truncation leaves: token columns cut, media whole."""
    return {
        name: value[:tokens] if name in ("input_ids", "mm_token_type_ids") else value
        for name, value in document.items()
    }


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_c61_a_cut_inside_an_image_is_refused_and_names_the_document(name):
    collator = DataCollatorForNeatPacking(tiny_vlm(name))
    whole = with_images(3, [(1, 4, 4)], 2)
    with pytest.raises(ColumnError, match=r"Document 1 has 2 image placeholder tokens .* for 4"):
        collator([text(4), cut(whole, 5)])
    without_pixels = {k: v for k, v in whole.items() if k not in MEDIA}
    with pytest.raises(ColumnError, match=r"Document 0 has 4 image placeholder tokens .* for 0"):
        collator([without_pixels, text(4)])
    assert collator([cut(whole, 8), text(4)])["input_ids"].shape == (1, 12)


def test_c61_a_cut_inside_an_image_of_gemma_is_refused_too():
    collator = DataCollatorForNeatPacking(tiny_vlm("gemma3"))
    whole = gemma_image(3, 1, 2)
    cut_off = {**whole, **{k: whole[k][:5] for k in ("input_ids", "token_type_ids")}}
    with pytest.raises(ColumnError, match=r"Document 0 has 2 image placeholder tokens .* for 4"):
        collator([cut_off, gemma_text(4)])


def test_c61_pixels_that_do_not_belong_to_their_grids_are_refused():
    document = with_images(3, [(1, 4, 4)], 2)
    short = {**document, "pixel_values": document["pixel_values"][:12]}
    with pytest.raises(ColumnError, match=r"Document 1 has 12 patches .* stands for 16"):
        DataCollatorForNeatPacking(tiny_vlm("qwen3_vl"))([document, short])


def test_c61_packs_of_a_dataset_are_exact_and_no_policy_cuts_an_image():
    datasets = pytest.importorskip("datasets")
    model, alone = tiny_vlm("qwen2_vl"), tiny_vlm("qwen2_vl", "eager")
    documents = [
        with_images(3, [(1, 4, 4)], 2, seed=1),
        {**text(7, 2), "mm_token_type_ids": [0] * 7},
        with_images(2, [(1, 4, 4), (1, 2, 4)], 1, seed=3),
    ]
    records = [
        {
            **{key: d[key] for key in ("input_ids", "mm_token_type_ids")},
            "pixel_values": d["pixel_values"].tolist() if "pixel_values" in d else None,
            "image_grid_thw": d["image_grid_thw"].tolist() if "pixel_values" in d else None,
        }
        for d in documents
    ]
    stored = datasets.Dataset.from_list(records)
    view = pack_dataset(stored, max_length=32, seed=None)
    assert len(view) == 1
    order = [documents[index] for index, _, _ in view.plan.pieces(0)]
    batch = DataCollatorForNeatPacking(model)([view[0]])
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["image_grid_thw"].dtype == torch.int64
    assert parity_excess(model, alone, order, batch) <= 1
    for policy in ("truncate", "split"):
        with pytest.raises(ColumnError, match=r"Document 2 has 10 tokens and media"):
            pack_dataset(stored, max_length=9, on_overlong=policy)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor], ids=["list", "numpy", "tensor"])
def test_c26_columns_of_every_kind_are_packed_by_their_rule(kind):
    document = with_images(2, [(1, 2, 2)], 2)
    given = {
        "input_ids": kind(document["input_ids"]),
        "mm_token_type_ids": kind(document["mm_token_type_ids"]),
        "pixel_values": kind(document["pixel_values"].tolist()),
        "image_grid_thw": kind(document["image_grid_thw"].tolist()),
    }
    collator = DataCollatorForNeatPacking(tiny_vlm("qwen2_vl"), pad_to_multiple_of=8)
    batch = collator([given, text(2)])
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]
    assert torch.allclose(batch["pixel_values"].float(), document["pixel_values"])
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert batch["labels"].tolist()[0][0] == batch["labels"].tolist()[0][5] == -100


def test_masked_tokens_are_dropped_and_as_many_pixels_are_not():
    document = with_images(3, [(1, 4, 4)], 9)
    assert len(document["input_ids"]) == len(document["pixel_values"]) == 16
    padded = {**document, "attention_mask": [1] * 14 + [0] * 2}
    batch = DataCollatorForNeatPacking(tiny_vlm("qwen2_vl"))([padded])
    assert batch["input_ids"].shape == (1, 14)
    assert torch.equal(batch["pixel_values"], document["pixel_values"])


def test_a_missing_column_that_the_index_needs_is_named():
    document = with_images(3, [(1, 4, 4)], 2)
    del document["mm_token_type_ids"]
    with pytest.raises(ColumnError, match="mm_token_type_ids"):
        DataCollatorForNeatPacking(tiny_vlm("qwen2_vl"))([document])


def test_without_a_model_grids_are_refused_and_one_line_mends_it():
    document = with_images(3, [(1, 4, 4)], 2)
    contract = PackingCapabilities(packed_mask_type="flash_varlen")
    for collator in (DataCollatorForNeatPacking(), DataCollatorForNeatPacking(contract=contract)):
        with pytest.raises(ColumnError, match=r"Document 0 .* no model was given"):
            collator([document])
    own = DataCollatorForNeatPacking(
        contract=contract,
        position_index=DataCollatorForNeatPacking(tiny_vlm("qwen2_vl")).media.positions,
    )
    expected = DataCollatorForNeatPacking(tiny_vlm("qwen2_vl"))([document])["position_ids"]
    assert torch.equal(own([document])["position_ids"], expected)


def two_rows(document):
    """Positions of a model of one's own: time, and distance from the end."""
    length = len(document["input_ids"])
    return torch.stack([torch.arange(length), torch.arange(length).flip(0)])


def test_a_new_model_declares_its_columns_and_its_positions():
    documents = [
        {"input_ids": [5, 6, 7], "depth": [[1.0, 2.0]], "token_weight": [1.0, 0.5, 0.5]},
        {"input_ids": [8, 9], "depth": None, "token_weight": [2.0, 3.0]},
        {"input_ids": [4], "depth": [[3.0, 4.0], [5.0, 6.0]], "token_weight": [9.0]},
    ]
    with pytest.raises(ColumnError, match="depth"):
        DataCollatorForNeatPacking()(documents)
    collator = DataCollatorForNeatPacking(
        columns={"depth": "media", "token_weight": "token"}, position_index=two_rows
    )
    batch = pickle.loads(pickle.dumps(collator))(documents)
    assert batch["depth"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch["token_weight"].tolist() == [[1.0, 0.5, 0.5, 2.0, 3.0, 9.0]]
    assert batch["position_ids"].tolist() == [[[0, 1, 2, 0, 1, 0]], [[2, 1, 0, 1, 0, 0]]]
    wrong = DataCollatorForNeatPacking(
        columns=collator.columns, position_index=lambda document: torch.arange(3)
    )
    with pytest.raises(ColumnError, match=r"position_index gave shape \[3\] for document 0"):
        wrong(documents)


def test_media_of_two_shapes_are_refused_by_name():
    documents = [
        {"input_ids": [1], "pixel_values": torch.zeros(1, 3)},
        {"input_ids": [2], "pixel_values": torch.zeros(1, 4)},
    ]
    with pytest.raises(ColumnError, match="'pixel_values' has entries of shapes"):
        DataCollatorForNeatPacking()(documents)


def test_images_and_videos_with_one_placeholder_do_not_share_a_batch():
    collator = DataCollatorForNeatPacking(tiny_vlm("glm4v"))
    video, image = with_video("glm4v", 2, (2, 4, 4), 3), with_images(2, [(1, 4, 4)], 1)
    with pytest.raises(ColumnError, match=r"Document 0 marks video with the image placeholder 90"):
        collator([video, image])
    assert collator([video, text(3)])["video_grid_thw"].tolist() == [[2, 4, 4]]


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_the_varlen_kwargs_do_not_reach_the_tower_and_the_map_does_it_no_harm(name):
    model = tiny_vlm(name)
    seen = []
    for module in model.model.visual.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
            )
    batch = DataCollatorForNeatPacking(model)([with_images(3, [(1, 4, 4)], 1), text(8)])
    model(**batch)
    assert len(seen) == 2
    assert not any(set(VARLEN_KEYS) & names for names in seen)
    assert all("_packed_seq_ids" in names for names in seen), "else the rule is not needed"


def test_the_texts_offsets_in_a_tower_are_an_error():
    model = tiny_vlm("qwen2_vl")
    batch = DataCollatorForNeatPacking(model)([text(10), text(6)])
    states = torch.randn(1, 2, 16, 8)
    boundaries = {name: batch[name] for name in (*VARLEN_KEYS, "_packed_seq_ids")}
    tower = model.model.visual.blocks[0].attn
    with pytest.raises(
        BoundaryError, match=r"reached VisionAttention, a part of the 'vision_config'"
    ):
        neat_varlen_attention(tower, states, states, states, None, is_causal=False, **boundaries)
    only_map = {"_packed_seq_ids": batch["_packed_seq_ids"]}
    whole, _ = neat_varlen_attention(tower, states, states, states, None, is_causal=False)
    kept, _ = neat_varlen_attention(
        tower, states, states, states, None, is_causal=False, **only_map
    )
    assert torch.equal(kept, whole)
    of_text = model.model.language_model.layers[0].self_attn
    cut_up, _ = neat_varlen_attention(
        of_text, states, states, states, None, is_causal=False, **only_map
    )
    assert not torch.equal(cut_up, whole)


def test_flex_masks_that_cannot_say_image_blocks_are_refused_by_name():
    model = tiny_vlm("gemma3", "flex_attention")
    with pytest.raises(
        UnsupportedModelError, match="Gemma3ForConditionalGeneration looks both ways"
    ):
        DataCollatorForNeatPacking(model)([gemma_image(2, 1, 1), gemma_text(3)])


def test_columns_of_pixels_keep_their_dtype():
    document = with_images(1, [(1, 2, 2)], 1)
    half = {**document, "pixel_values": document["pixel_values"].to(torch.bfloat16)}
    batch = DataCollatorForNeatPacking(tiny_vlm("qwen2_vl"))([half])
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["pixel_values"].shape == (4, PATCH_VALUES)
    assert (batch["input_ids"] == IMAGE).sum() == 1
