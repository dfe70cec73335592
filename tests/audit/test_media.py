"""Batches with images and video: every document is compared with itself alone, with its own pixels."""

import pytest
import torch
from multimodal.tiny_vlms import (
    gemma_image,
    gemma_text,
    prefix_document,
    text,
    tiny_vlm,
    with_images,
    with_video,
)

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit import audit_model
from hf_neat_packing.audit.batches import read_batch
from hf_neat_packing.errors import BoundaryError

DOCUMENTS = {
    "qwen2_vl": lambda: [with_images(3, [(1, 4, 4), (1, 4, 8)], 5, 1), text(6, 2), with_images(2, [(1, 4, 4)], 4, 3)],
    "qwen3_vl": lambda: [with_video("qwen3_vl", 3, (2, 4, 4), 4, 1), with_video("qwen3_vl", 2, (1, 4, 4), 3, 2)],
    "gemma3": lambda: [gemma_image(3, 2, 4, 1), gemma_text(6, 2), gemma_image(2, 1, 5, 3)],
    "paligemma": lambda: [prefix_document(4, 5, 1), prefix_document(3, 6, 2)],
}  # fmt: skip


def batch_of(model, name):
    return DataCollatorForNeatPacking(model)(DOCUMENTS[name]())


@pytest.mark.parametrize("key", ["neat_varlen", "sdpa"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_with_media_are_audited_with_their_own(name, key):
    model = tiny_vlm(name, key)
    report = audit_model(model, batch=batch_of(model, name))
    assert report.verdict == "exact", report.summary()
    assert not report.notes
    assert {check.name for check in report.checks if check.is_control and check.passed}


def test_the_media_of_a_document_are_those_it_came_with():
    model = tiny_vlm("qwen2_vl")
    documents = DOCUMENTS["qwen2_vl"]()
    packed = read_batch(batch_of(model, "qwen2_vl"), model)
    for number, document in enumerate(documents):
        alone = packed.alone(number)
        assert alone["input_ids"][0].tolist() == document["input_ids"]
        for name in ("pixel_values", "image_grid_thw"):
            assert (name in alone) == (name in document)
            if name in document:
                assert torch.equal(alone[name], document[name])
    changed, pixels = packed.changed(2)["pixel_values"], packed.batch["pixel_values"]
    moved = (changed != pixels).all(dim=1)
    assert moved.tolist() == [False] * 48 + [True] * 16


def test_pixels_that_reach_another_document_are_caught():
    model = tiny_vlm("qwen2_vl")

    def mix(module, args, output):
        patches = output.pooler_output
        output["pooler_output"] = patches + patches.mean(0)
        return output

    model.model.visual.register_forward_hook(mix)
    report = audit_model(model, batch=batch_of(model, "qwen2_vl"), gradients=False)
    assert report.verdict == "wrong"
    assert "isolation, bitwise" in {check.name for check in report.failed}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: {**b, "image_grid_thw": b["image_grid_thw"][:2]}, "media for 0"),
        (lambda b: {**b, "image_grid_thw": b["image_grid_thw"].roll(1, 0)}, "placeholders"),
        (
            lambda b: {**b, "image_grid_thw": b["image_grid_thw"].repeat(2, 1)},
            "belong to no document",
        ),
        (lambda b: {**b, "pixel_values": b["pixel_values"][:-1]}, "stand for 64 patches of 63"),
        (lambda b: {**b, "audio_features": torch.zeros(3, 4)}, "audio_features"),
    ],
)
def test_media_that_cannot_be_shared_out_are_refused_by_name(change, words):
    model = tiny_vlm("qwen2_vl")
    with pytest.raises(BoundaryError, match=words):
        audit_model(model, batch=change(batch_of(model, "qwen2_vl")))
