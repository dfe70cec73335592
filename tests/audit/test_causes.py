"""Each cause of mixing, provoked in a real architecture, is told by its name."""

import pytest
import torch

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit import audit_model
from hf_neat_packing.audit.batches import random_documents
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.audit.zoo_configs import tiny_config
from hf_neat_packing.masks import block_mask


def positions_only(model, *, start=0):
    """What a flattening collator sends: restarting positions and no boundaries."""
    batch = DataCollatorForNeatPacking(position_ids_start=start)(random_documents(model))
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


@pytest.mark.parametrize(
    ("model_type", "key", "cause", "module"),
    [
        ("gpt_oss", "eager", "M0", "model.layers.0.self_attn"),
        ("biogpt", "sdpa", "M1", "biogpt.layers.0.self_attn"),
        ("rembert", "eager", "M1", "rembert.encoder.layer.0.attention.self"),
        ("bloom", "eager", "M0", "transformer.h.0.self_attention"),
        ("opt", "sdpa", "M0", "model.decoder.layers.0.self_attn"),
        ("openai-gpt", "eager", "M2", "transformer.h.0.attn"),
        ("rwkv", "eager", "R", "rwkv.blocks.0.attention.time_shift"),
        ("recurrent_gemma", "sdpa", "R", "model.layers.0.temporal_block.conv_1d"),
    ],
)
def test_a_leak_is_placed_and_named(model_type, key, cause, module):
    model = tiny_model(model_type, attn_implementation=key)
    report = audit_model(model, batch=positions_only(model))
    assert report.verdict == "wrong"
    assert (report.finding.cause, report.finding.module) == (cause, module)
    assert report.finding.advice


def test_a_cache_that_hides_the_documents_is_named():
    model = tiny_model("llama", attn_implementation="sdpa")
    batch = positions_only(model)
    assert audit_model(model, batch=batch).finding.cause == "cache"
    assert audit_model(model, batch=batch | {"use_cache": False}).verdict == "exact"


def test_positions_that_have_no_effect_are_named():
    model = tiny_model("bart", attn_implementation="neat_varlen")
    report = audit_model(model)
    assert report.finding.cause == "P"
    assert "isolation, bitwise" not in {check.name for check in report.failed}


def test_a_lost_window_is_named():
    model = tiny_model("mistral", attn_implementation="sdpa")
    batch = DataCollatorForNeatPacking(model)(random_documents(model))
    assert audit_model(model, batch=batch).verdict == "exact"
    # One block-causal mask for all: documents are apart, and their windows are gone.
    batch["attention_mask"] = block_mask(batch["_packed_seq_ids"])
    report = audit_model(model, batch=batch)
    assert report.verdict == "wrong"
    assert report.finding.cause == "W"
    assert report.finding.module == "model.layers.0.self_attn"


def test_a_temperature_by_row_index_is_named():
    report = audit_model(tiny_model("llama4_text", attn_implementation="sdpa"))
    assert report.finding.cause == "T"
    assert report.finding.module == "model.layers.3.self_attn"
    assert report.finding.layer_type == "full_attention"


def test_rotary_tables_chosen_by_the_longest_document_are_named():
    from transformers import AutoModelForCausalLM

    from hf_neat_packing.audit.zoo import redraw_weights

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = tiny_config("llama", {"max_position_embeddings": 8, "rope_parameters": rope})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="neat_varlen")
    redraw_weights(model)
    # Built from the model the collator refuses such a batch.
    report = audit_model(model.eval(), collator=DataCollatorForNeatPacking())
    assert report.verdict == "wrong"
    assert report.finding.cause == "rope"
    short = [{"input_ids": d["input_ids"][:8]} for d in random_documents(model)]
    assert audit_model(model, documents=short).verdict == "exact"


def test_sparse_attention_on_row_slots_is_named():
    model = tiny_model("minimax_m3_vl_text", attn_implementation="sdpa")
    report = audit_model(model)
    assert report.verdict == "wrong"
    assert report.finding.cause == "S"


def test_one_pass_of_the_audit_says_which_dtype_the_truth_has():
    report = audit_model(tiny_model("llama", dtype=torch.bfloat16))
    assert (report.dtype, report.oracle) == ("bfloat16", "float64")
