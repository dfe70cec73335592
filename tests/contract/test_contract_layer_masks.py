"""Mask patterns of the layers and how a model takes them, read from built models."""

import copy

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CamembertConfig,
    CamembertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_neat_packing.capabilities import model_capabilities
from hf_neat_packing.contract import LayerMask
from hf_neat_packing.errors import UnsupportedModelError

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
FULL = LayerMask()
SLIDING = LayerMask("sliding_attention", "sliding", 4)
BOTH = ["sliding_attention", "full_attention"]


def build(model_class, config, key="sdpa"):
    torch.manual_seed(0)
    return model_class._from_config(copy.deepcopy(config), attn_implementation=key)


@pytest.mark.parametrize(
    ("model_class", "config", "masks", "delivery"),
    [
        (LlamaForCausalLM, LlamaConfig(**GROUPED), {FULL}, "single"),
        (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=4), {SLIDING}, "windowed"),
        (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=None), {FULL}, "single"),
        (Qwen2ForCausalLM, Qwen2Config(**GROUPED), {FULL}, "single"),
        (
            Qwen2ForCausalLM,
            Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
            {FULL, SLIDING},
            "dict",
        ),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(**GROUPED, sliding_window=4, layer_types=BOTH, head_dim=8),
            {FULL, SLIDING},
            "dict",
        ),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(
                **GROUPED, sliding_window=4, layer_types=["sliding_attention"] * 2, head_dim=8
            ),
            {SLIDING},
            "windowed",
        ),
        (
            Gemma3ForCausalLM,
            # The window is in the config, but no layer has it.
            Gemma3TextConfig(
                **GROUPED, sliding_window=4, layer_types=["full_attention"] * 2, head_dim=8
            ),
            {FULL},
            "single",
        ),
        (
            Llama4ForCausalLM,
            Llama4TextConfig(
                **GROUPED,
                head_dim=8,
                num_local_experts=2,
                attention_chunk_size=4,
                layer_types=["chunked_attention", "full_attention"],
            ),
            {FULL, LayerMask("chunked_attention", "chunked", 4)},
            "dict",
        ),
    ],
)
@pytest.mark.parametrize("key", ["sdpa", "eager"])
def test_patterns_and_delivery(model_class, config, masks, delivery, key):
    capabilities = model_capabilities(build(model_class, config, key))
    assert set(capabilities.layer_masks) == masks
    assert capabilities.mask_delivery == delivery
    assert capabilities.is_causal


def test_varlen_layouts_need_no_patterns():
    config = MistralConfig(**GROUPED, sliding_window=4)
    capabilities = model_capabilities(build(MistralForCausalLM, config, "neat_varlen"))
    assert capabilities.layer_masks == (FULL,)


def test_windows_with_a_forward_that_takes_one_mask_are_refused_by_name():
    class OneMask(MistralForCausalLM):
        pass

    config = MistralConfig(**GROUPED, sliding_window=4)
    config.layer_types = BOTH
    model = build(OneMask, config)
    with pytest.raises(UnsupportedModelError, match=r"OneMask.*sliding_attention.*neat_varlen"):
        model_capabilities(model)
    assert model_capabilities(build(OneMask, config, "neat_varlen")).layout == "varlen"


def test_an_unknown_layer_type_or_a_missing_size_is_refused_by_name():
    model = build(LlamaForCausalLM, LlamaConfig(**GROUPED))
    model.config.layer_types = ["spiral_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="spiral_attention"):
        model_capabilities(model)
    model.config.layer_types = BOTH
    with pytest.raises(UnsupportedModelError, match="size None"):
        model_capabilities(model)


def test_encoders_are_not_causal():
    for model_class, config in (
        (BertForMaskedLM, BertConfig(**SIZES)),
        (RobertaForMaskedLM, RobertaConfig(**SIZES)),
    ):
        assert model_capabilities(build(model_class, config)).is_causal is False
    config = ModernBertConfig(**SIZES, pad_token_id=0, local_attention=8)
    capabilities = model_capabilities(build(ModernBertForMaskedLM, config))
    assert capabilities.is_causal is False
    assert capabilities.mask_delivery == "dict"
    assert SLIDING in capabilities.layer_masks
    assert "bidirectional" in str(capabilities)


def test_a_decoder_built_from_an_encoder_is_causal():
    from transformers import BertLMHeadModel

    model = build(BertLMHeadModel, BertConfig(**SIZES, is_decoder=True))
    assert model_capabilities(model).is_causal is True


def test_causal_and_bidirectional_layers_together_are_refused_for_masks():
    model = build(LlamaForCausalLM, LlamaConfig(**GROUPED))
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        model_capabilities(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_masks_are_written_in_the_models_dtype(dtype):
    model = build(LlamaForCausalLM, LlamaConfig(**GROUPED), "eager").to(dtype)
    assert model_capabilities(model).mask_dtype == dtype


@pytest.mark.parametrize(
    ("model_class", "config", "start"),
    [
        (LlamaForCausalLM, LlamaConfig(**GROUPED), 0),
        (BertForMaskedLM, BertConfig(**SIZES), 0),
        (RobertaForMaskedLM, RobertaConfig(**SIZES), 2),
        (CamembertForMaskedLM, CamembertConfig(**SIZES, pad_token_id=3), 4),
        (
            OPTForCausalLM,
            OPTConfig(
                vocab_size=97,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                word_embed_proj_dim=32,
            ),
            0,
        ),
    ],
)
def test_c16_the_first_position_is_the_one_behind_the_padding_entry(model_class, config, start):
    assert model_capabilities(build(model_class, config)).position_ids_start == start


def test_recurrent_layers_ask_for_seq_idx_and_get_no_mask():
    config = BambaConfig(
        **GROUPED,
        attn_layer_indices=[1],
        mamba_d_head=8,
        mamba_n_heads=8,
        mamba_d_state=8,
        mamba_expand=2,
    )
    for key in ("sdpa", "neat_varlen"):
        capabilities = model_capabilities(build(BambaForCausalLM, config, key))
        assert capabilities.requires_seq_idx is True
    masks = model_capabilities(build(BambaForCausalLM, config)).layer_masks
    assert {mask.kind for mask in masks} == {"recurrent", "full"}
    assert (
        model_capabilities(build(LlamaForCausalLM, LlamaConfig(**GROUPED))).requires_seq_idx
        is False
    )
