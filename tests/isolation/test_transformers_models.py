"""`isolate` on one type of every cause, with the collator's batch as it is."""

import pytest
import torch
from isolation.mixing_models import documents, values

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.isolation import isolate

LENGTHS = [7, 1, 12, 5, 9]

# type -> words of the repairs that are expected, in any order
CAUSES = {
    "llama": [],
    "gpt_oss": [],
    "mamba2": ["run once per document"],
    "lfm2": ["run once per document"],
    "qwen3_next": ["run once per document"],
    "rwkv": ["run once per document"],
    "zaya": ["run once per document"],
    "recurrent_gemma": ["run once per document"],
    "granitemoehybrid": ["run once per document"],
    "bart": ["positions restarted"],
    "musicgen": ["positions restarted"],
    "bloom": ["mask of other documents"],
    "mpt": ["True where hidden"],
    "roformer": ["mask of other documents"],
    "deepseek_v32": [],
    "minimax_m3_vl_text": ["own eager attention", "part of the mask"],
    "llama4_text": ["temperature"],
    "xlnet": ["unpacked"],
    "prophetnet": ["unpacked"],
    "reformer": ["unpacked"],
}
# Experts are multiplied in groups whose sizes the other documents' tokens change: equal to rounding only.
ROUNDED = {
    "gpt_oss",
    "granitemoehybrid",
    "qwen3_next",
    "deepseek_v32",
    "minimax_m3_vl_text",
    "llama4_text",
}


def lengths_of(model_type):
    return [7, 1, 12, 5, 11] if model_type == "reformer" else LENGTHS


def alone(model, docs):
    with torch.no_grad():
        return [values(model(input_ids=ids[None], use_cache=False))[0] for ids in docs]


def packed(model, docs, collate):
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels", None)
    with torch.no_grad():
        return values(model(**batch))[0].split([len(ids) for ids in docs])


def largest_error(parts, truth):
    scale = max(float(t.abs().max()) for t in truth)
    return max(float((p - t).abs().max()) for p, t in zip(parts, truth, strict=True)) / scale


@pytest.mark.parametrize("model_type", CAUSES)
def test_every_cause_is_healed_under_neat_varlen(model_type):
    docs = documents(lengths_of(model_type))
    truth = alone(tiny_model(model_type), docs)
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    report = isolate(model)
    done = [part.repair for part in report.applied] + (["unpacked"] if report.unpacked else [])
    for words in CAUSES[model_type]:
        assert any(words in repair for repair in done), done
    assert bool(done) == bool(CAUSES[model_type]), done
    collate = DataCollatorForNeatPacking(model)
    one = packed(model, docs, collate)
    assert largest_error(one, truth) < 1e-4
    other = [(docs[0] + 31) % 55 + 5, *docs[1:]]
    two = packed(model, other, collate)
    moved = [float((a - b).abs().max()) for a, b in zip(one, two, strict=True)]
    assert moved[0] > 0
    if model_type in ROUNDED:
        assert max(moved[1:]) < 1e-4 * max(float(t.abs().max()) for t in truth)
    else:
        assert moved[1:] == [0.0] * (len(docs) - 1)


@pytest.mark.parametrize("key", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["inkling_text", "marian", "nemotron_h", "llama4_text"])
def test_masks_that_a_contract_refuses_or_loses_are_made_inside(model_type, key):
    docs = documents(LENGTHS)
    model = tiny_model(model_type, attn_implementation=key)
    truth = alone(model, docs)
    with isolate(model):
        assert largest_error(packed(model, docs, DataCollatorForNeatPacking(model)), truth) < 1e-4
    assert "packed_mask_type" not in vars(model)


@pytest.mark.parametrize("model_type", ["fuyu", "got_ocr2", "moss_transcribe_diarize", "mamba2"])
def test_no_cache_is_built_for_a_packed_row(model_type):
    docs = documents(LENGTHS)
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    with isolate(model):
        batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
        batch.pop("labels")
        for switch in ({}, {"use_cache": True}):
            with torch.no_grad():
                output = model(**batch, **switch)
            for name in ("past_key_values", "cache_params", "state"):
                assert getattr(output, name, None) is None


def test_a_model_can_still_generate():
    model = tiny_model("lfm2", attn_implementation="neat_varlen")
    ids = documents([6])[0][None]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    with isolate(model):
        assert torch.equal(model.generate(ids, **options), before)


@pytest.mark.parametrize("tail", [0, 1])
def test_c05_a_row_of_one_document_runs_without_fast_kernels(tail):
    model = tiny_model("bamba", attn_implementation="neat_varlen")
    docs = documents([7])
    truth = alone(model, docs)
    with isolate(model):
        collate = DataCollatorForNeatPacking(model, row_length=7 + tail)
        batch = collate([{"input_ids": docs[0].tolist()}])
        batch.pop("labels")
        assert "seq_idx" in batch
        with torch.no_grad():
            output = values(model(**batch))[0, :7]
    assert largest_error([output], truth) < 1e-5


@pytest.mark.parametrize("lengths", [[4, 3], [1, 1, 1], [1, 2, 1, 9]])
def test_c04_documents_shorter_than_the_convolution_stay_apart(lengths):
    model = tiny_model("lfm2", attn_implementation="neat_varlen")
    docs = documents(lengths)
    truth = alone(model, docs)
    with isolate(model):
        collate = DataCollatorForNeatPacking(model)
        one = packed(model, docs, collate)
        changed = [docs[0].clone(), *docs[1:]]
        changed[0][-2:] = (changed[0][-2:] + 17) % 55 + 5
        two = packed(model, changed, collate)
    assert largest_error(one, truth) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_c03_documents_longer_than_a_kernel_chunk_stay_apart():
    model = tiny_model("qwen3_next", attn_implementation="neat_varlen")
    docs = documents([5, 6, 70])
    truth = alone(model, docs)
    with isolate(model):
        parts = packed(model, docs, DataCollatorForNeatPacking(model))
    assert largest_error(parts, truth) < 1e-4
