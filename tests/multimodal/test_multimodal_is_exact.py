"""Rows of text, images and video equal their documents alone, each check beside a control that must fail."""

import pytest
import torch
from tiny_vlms import (
    GRID_FAMILIES,
    IMAGE,
    VIDEO,
    gemma_image,
    gemma_text,
    prefix_document,
    text,
    tiny_vlm,
    with_images,
    with_video,
)
from vlm_exactness import leaking_documents, parity_excess, pixel_gradient_leaks

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.contract import VARLEN_KEYS

KEYS = ("neat_varlen", "sdpa", "eager")
PLACEHOLDERS = (IMAGE, VIDEO)


def rows(name):
    """Text beside images, both ways round, and images at both sides of a join."""
    if name == "gemma3":
        first, second = gemma_image(3, 1, 0, seed=1), gemma_image(0, 2, 4, seed=2)
        writing = gemma_text(6, seed=3)
    else:
        first = with_images(3, [(1, 4, 4)], 0, seed=1)
        second = with_images(0, [(1, 4, 4), (1, 2, 6)], 4, seed=2)
        writing = text(6, seed=3)
    return {
        "text first": [writing, first, second],
        "image first": [first, writing],
        "images touch": [first, second, first],
    }


def without_boundaries(batch):
    """The control: the same row as one document, its positions running on."""
    running = torch.arange(batch["input_ids"].shape[1])
    kept = {
        name: value
        for name, value in batch.items()
        if name not in (*VARLEN_KEYS, "_packed_seq_ids", "attention_mask")
    }
    return {**kept, "position_ids": running.expand_as(batch["position_ids"])}


@pytest.mark.parametrize("row", ["text first", "image first", "images touch"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", [*GRID_FAMILIES, "gemma3"])
def test_logits_and_every_gradient_equal_the_documents_alone(name, key, row):
    packed, alone = tiny_vlm(name, key), tiny_vlm(name, "eager")
    documents = rows(name)[row]
    batch = DataCollatorForNeatPacking(packed, pad_to_multiple_of=8)(documents)
    assert parity_excess(packed, alone, documents, batch) <= 1
    tower = [p.grad for n, p in packed.named_parameters() if "visual" in n or "vision" in n]
    assert sum(grad is not None and bool(grad.any()) for grad in tower) > len(tower) / 2
    if row == "text first":
        assert parity_excess(packed, alone, documents, without_boundaries(batch)) > 100


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", [*GRID_FAMILIES, "gemma3"])
def test_changing_text_and_pixels_of_one_document_moves_no_bit_of_another(name, key):
    model = tiny_vlm(name, key)
    collator = DataCollatorForNeatPacking(model)
    for documents in rows(name).values():
        assert leaking_documents(model, documents, collator, PLACEHOLDERS) == []
    assert leaking_documents(
        model, documents, lambda row: without_boundaries(collator(row)), PLACEHOLDERS
    )


@pytest.mark.parametrize("name", [*GRID_FAMILIES, "gemma3"])
def test_no_gradient_reaches_another_documents_pixels(name):
    model = tiny_vlm(name)
    for documents in rows(name).values():
        batch = DataCollatorForNeatPacking(model)(documents)
        assert pixel_gradient_leaks(model, documents, batch) == []
    assert pixel_gradient_leaks(model, documents, without_boundaries(batch)) != []


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_video_is_exact_too(name, key):
    packed, alone = tiny_vlm(name, key), tiny_vlm(name, "eager")
    documents = [
        with_video(name, 2, (2, 4, 4), 3, seed=4),
        text(5, seed=5),
        with_video(name, 1, (3, 2, 4), 0, seed=6),
    ]
    if name != "glm4v":
        documents.insert(1, with_images(2, [(1, 4, 4)], 2, seed=7))
    batch = DataCollatorForNeatPacking(packed)(documents)
    assert parity_excess(packed, alone, documents, batch) <= 1
    assert (
        leaking_documents(packed, documents, DataCollatorForNeatPacking(packed), PLACEHOLDERS) == []
    )


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_positions_without_boundaries_leak_in_three_rows_and_not_in_four(name):
    """The form that these models need, and the one that looks right and is not."""
    model = tiny_vlm(name, "sdpa")
    collator = DataCollatorForNeatPacking(model)
    documents = rows(name)["text first"]

    def only_positions(row, first):
        batch = collator(row)
        kept = {k: v for k, v in batch.items() if k not in ("attention_mask", "_packed_seq_ids")}
        return {**kept, "position_ids": batch["position_ids"][first:]}

    assert collator(documents)["position_ids"].shape == (
        4,
        1,
        sum(len(d["input_ids"]) for d in documents),
    )
    assert (
        leaking_documents(model, documents, lambda row: only_positions(row, 0), PLACEHOLDERS) == []
    )
    assert (
        leaking_documents(model, documents, lambda row: only_positions(row, 1), PLACEHOLDERS) != []
    )


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_plain_positions_would_be_wrong_for_images(name):
    packed, alone = tiny_vlm(name), tiny_vlm(name, "eager")
    documents = rows(name)["images touch"]
    batch = DataCollatorForNeatPacking(packed)(documents)
    plain = {**batch, "position_ids": batch["position_ids"][0]}
    assert parity_excess(packed, alone, documents, plain) > 100


@pytest.mark.parametrize("key", KEYS)
def test_c11_images_that_touch_at_a_join_stay_two_images(key):
    packed, alone = tiny_vlm("gemma3", key), tiny_vlm("gemma3", "eager")
    documents = [gemma_image(2, 1, 0, seed=1), gemma_image(0, 1, 1, seed=2)]
    batch = DataCollatorForNeatPacking(packed)(documents)
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0]]
    assert parity_excess(packed, alone, documents, batch) <= 1
    assert (
        leaking_documents(packed, documents, DataCollatorForNeatPacking(packed), PLACEHOLDERS) == []
    )


def test_c11_control_transformers_own_packing_reads_the_image_table_at_another_document():
    """Restarting positions under `sdpa`: no leak, and yet not what the document alone computes."""
    packed, alone = tiny_vlm("gemma3", "sdpa"), tiny_vlm("gemma3", "eager")
    documents = rows("gemma3")["text first"]
    batch = DataCollatorForNeatPacking(packed)(documents)
    del batch["attention_mask"], batch["_packed_seq_ids"]
    assert parity_excess(packed, alone, documents, batch) > 100


@pytest.mark.parametrize("key", ["sdpa", "eager"])
def test_c11_the_4d_mask_has_the_image_blocks_and_nothing_outside_the_documents(key):
    model = tiny_vlm("gemma3", key)
    documents = [gemma_image(2, 1, 0), gemma_image(0, 1, 1)]
    masks = DataCollatorForNeatPacking(model)(documents)["attention_mask"]
    full, sliding = masks["full_attention"][0, 0], masks["sliding_attention"][0, 0]
    allowed = full if key == "sdpa" else full == 0
    expected = torch.ones(11, 11).tril().bool()
    expected[6:, :6] = False
    expected[2:6, 2:6] = expected[6:10, 6:10] = True
    assert torch.equal(allowed, expected)
    near = torch.arange(11)[None, :] > torch.arange(11)[:, None] - 4
    assert torch.equal(sliding if key == "sdpa" else sliding == 0, expected & near)


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_an_image_with_as_many_patches_as_the_row_has_tokens_is_not_cut(name):
    """The document map fits the tower's patches here by its shape alone."""
    packed, alone = tiny_vlm(name), tiny_vlm(name, "eager")
    documents = [with_images(3, [(1, 4, 4)], 1, seed=1), text(8, seed=2)]
    batch = DataCollatorForNeatPacking(packed)(documents)
    assert batch["_packed_seq_ids"].shape == (1, 16)
    assert len(batch["pixel_values"]) == 16
    assert parity_excess(packed, alone, documents, batch) <= 1


@pytest.mark.parametrize("key", KEYS)
def test_a_prefix_that_sees_both_ways_ends_with_its_document(key):
    packed, alone = tiny_vlm("paligemma", key), tiny_vlm("paligemma", "eager")
    documents = [
        prefix_document(3, 4, seed=1),
        prefix_document(2, 0, seed=2),
        prefix_document(0, 3, seed=3),
    ]
    collator = DataCollatorForNeatPacking(packed)
    batch = collator(documents)
    assert parity_excess(packed, alone, documents, batch) <= 1
    assert leaking_documents(packed, documents, collator, PLACEHOLDERS) == []
    causal = {**batch, "token_type_ids": torch.ones_like(batch["token_type_ids"])}
    if key == "neat_varlen":
        assert parity_excess(packed, alone, documents, causal) > 100
