"""About 25 types that cover every cause of mixing and every kind of layer; `make zoo` runs them all."""

import pytest

from hf_neat_packing.audit.zoo_run import audit_type

# What each type is here for.
TYPES = {
    "llama": "full attention",
    "gpt2": "absolute positions",
    "qwen3": "full and sliding layers",
    "gemma3_text": "softcaps, norms, sliding layers",
    "modernbert-decoder": "local and global layers",
    "gpt_oss": "attention sinks, masks built without positions (M0)",
    "mixtral": "experts",
    "deepseek_v3": "latent attention",
    "llama4_text": "chunks, a temperature by row index (T)",
    "opt": "masks built without positions (M0)",
    "bloom": "ALiBi (M0, P)",
    "bart": "its own padding mask, positions ignored (M1, P)",
    "openai-gpt": "its own causal mask (M2)",
    "roberta": "positions that start behind the padding entry",
    "mamba2": "a state-space layer (R)",
    "qwen3_next": "a gated delta rule (R)",
    "lfm2": "a short convolution (R)",
    "recurrent_gemma": "a linear recurrent unit (R)",
    "rwkv": "a token shift (R)",
    "granitemoehybrid": "state-space and attention layers (R, M0)",
    "minimax_m3_vl_text": "sparse attention laid on row slots (S)",
    "deepseek_v4": "compressed keys laid on row slots (S)",
    "bert:masked": "bidirectional attention",
    "modernbert:masked": "bidirectional windows",
    "blt": "byte patches (B)",
}


@pytest.mark.parametrize("model_type", TYPES)
def test_every_document_is_what_it_is_alone(model_type):
    result = audit_type(model_type, ["neat_varlen"])
    failures = [
        f"{run['layout']}: {run['verdict']}, {run['reason']}"
        for run in result["runs"]
        if run["verdict"] != "exact"
    ]
    assert not failures
    assert len(result["runs"]) == 2


@pytest.mark.parametrize("key", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "mamba2", "bert:masked"])
def test_keys_with_masks_are_exact_or_refused_by_name(model_type, key):
    for run in audit_type(model_type, [key])["runs"]:
        assert run["verdict"] in ("exact", "refused"), run["reason"]
        assert run["verdict"] == "exact" or model_type in run["reason"]


@pytest.mark.parametrize("model_type", ["reformer", "cpmant", "prophetnet"])
def test_what_cannot_be_exact_is_refused_before_the_first_step(model_type):
    for run in audit_type(model_type, ["neat_varlen"])["runs"]:
        assert run["verdict"] in ("exact", "refused"), run["reason"]
        assert run["verdict"] == "exact" or "apart" in run["reason"]


@pytest.mark.parametrize("model_type", ["opt", "bloom", "mpt", "gpt_neo", "gpt2"])
def test_c09_models_without_positions_are_exact_or_refused_with_the_reason(model_type):
    for run in audit_type(model_type, ["sdpa", "eager"])["runs"]:
        assert run["verdict"] in ("exact", "refused"), run["reason"]
        assert run["verdict"] == "exact" or "ForCausalLM" in run["reason"]


@pytest.mark.parametrize(
    "model_type", ["xlm-roberta", "camembert:masked", "mpnet:masked", "esm:masked"]
)
def test_c16_positions_behind_the_padding_entry_are_the_models_own(model_type):
    for run in audit_type(model_type, ["neat_varlen"])["runs"]:
        assert run["verdict"] == "exact", run["reason"]
