"""Sizes that make any transformers config tiny: windows and chunks shorter than the documents.

`SIZES` holds for every config that has a field of that name. `EXCEPTIONS` adds, by model type, what a
config checks against itself, and layer lists in which each kind of layer occurs.
"""

from typing import Any, Final

HIDDEN: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 16
FEED_FORWARD: Final = 96
VOCABULARY: Final = 128
WINDOW: Final = 4

# Ids of special tokens (image, audio, ...) start here; documents of the audit use smaller ones.
FIRST_SPECIAL_ID: Final = 110

REMOVE: Final = object()
"""In `EXCEPTIONS`: leave this field at the default that the config computes."""

_HIDDEN = """hidden_size d_model n_embd embedding_dim embedding_size word_embed_proj_dim input_embedding_size
output_embedding_size attention_hidden_size lru_width"""
_FEED_FORWARD = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner n_inner dff dim_ff
ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size"""
_HEADS = """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads mamba_n_heads
mamba_num_heads linear_num_value_heads linear_num_heads"""
_KV_HEADS = """num_key_value_heads kv_n_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads
n_mamba_heads"""
_SIXTEEN = """head_dim attention_head_size d_head d_kv kv_channels dim_head global_head_dim swa_head_dim
kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank index_head_dim index_n_heads mamba_headdim linear_key_head_dim
linear_value_head_dim linear_head_dim query_pre_attn_scalar block_multiple_of rel_extent
ffn_round_up_to_multiple_of router_hidden_size"""
_THIRTY_TWO = """expert_ffn_hidden_size q_lora_rank moe_intermediate_size shared_expert_intermediate_size
shared_experts_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
expert_intermediate_size mamba_d_head mamba_head_dim"""
_EIGHT = """qk_rope_head_dim num_experts num_local_experts n_routed_experts moe_num_experts mamba_d_state
mamba_dt_rank ssm_state_size state_size time_step_rank rotary_dim adapter_rank hidden_size_per_layer_input
laurel_rank d_rel log_scaling_n_floor floor_scale gated_norm_rank"""
_FOUR = """index_topk mamba_d_conv conv_kernel linear_conv_kernel_dim short_conv_kernel_size mamba_chunk_size
chunk_size block_size sliding_window sliding_window_size attention_window_size attention_chunk_size window_size
keep_window_size"""
_THREE = "num_hidden_layers n_layer n_layers"
_TWO = """num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks o_groups
num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group
zero_expert_num mamba_expand type_vocab_size"""
_ONE = """topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace
num_dense_layers moe_layer_start_index mamba_n_groups mamba_ngroups n_groups max_window_layers"""
_ZERO = "num_nextn_predict_layers num_mtp_layers pad_token_id"
_POSITIONS = """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length
model_max_length"""


def _table(**groups: int) -> dict[str, int]:
    return {name: size for names, size in groups.items() for name in globals()[names].split()}


SIZES: Final[dict[str, Any]] = {
    **_table(
        _HIDDEN=HIDDEN,
        _FEED_FORWARD=FEED_FORWARD,
        _HEADS=HEADS,
        _KV_HEADS=KV_HEADS,
        _SIXTEEN=16,
        _THIRTY_TWO=32,
        _EIGHT=8,
        _FOUR=WINDOW,
        _THREE=3,
        _TWO=2,
        _ONE=1,
        _ZERO=0,
        _POSITIONS=128,
    ),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "qk_head_dim": 24,
    "local_attention": 2 * WINDOW,
    "mamba_d_ssm": 128,
    "moe_layer_end_index": -1,
    "max_source_positions": 64,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "forced_eos_token_id": 2,
}

_FULL_SLIDING = ["full_attention", "sliding_attention"]
_TWO_KINDS: dict[str, Any] = {"layer_types": _FULL_SLIDING, "num_hidden_layers": 2}
_LINEAR_FULL = ["linear_attention", "full_attention"]
_LINEAR_HYBRID = ["linear_attention", "hybrid"] * 2
_CHUNKED = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "moe_layers": [1, 3],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "head_dim": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
_DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_hidden_layers": 2,
    "sliding_window": WINDOW,
    "head_dim": 24,
    "num_key_value_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
_QWEN4 = {
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "num_hidden_layers": 3,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 200,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "hc_lowrank": 16,
    "hc_count": 2,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_BLT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FEED_FORWARD,
    "vocab_size": 260,
}
_DECODER = {"is_decoder": True}
_ENCODERS_THAT_DECODE = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"""

EXCEPTIONS: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(_ENCODERS_THAT_DECODE.split(), _DECODER),
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 101,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": WINDOW,
        "patcher_config": _BLT | {"num_hidden_layers": 1},
        "encoder_config": _BLT | {"num_hidden_layers": 1, "hidden_size_global": 2 * HIDDEN},
        "decoder_config": _BLT | {"num_hidden_layers": 2, "hidden_size_global": 2 * HIDDEN},
        "global_config": _BLT | {"num_hidden_layers": 2, "hidden_size": 2 * HIDDEN},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            },
            "full_attention": None,
        },
    },
    "cpmant": {
        "prompt_length": 4,
        "position_bias_num_buckets": 32,
        "position_bias_max_distance": 64,
        "prompt_types": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 1,
        "n_recurrent_loops": 2,
    },
    "dots1": _TWO_KINDS
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _DOTS3,
    "flint": {
        "num_hidden_layers": 4,
        "layer_types": _FULL_SLIDING * 2,
        "mlp_only_layers": [0, 1],
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [FEED_FORWARD] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "got_ocr2": {
        "text_config": _TWO_KINDS,
        "vision_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_dim": 32,
            "image_size": 64,
            "window_size": 2,
            "global_attn_indexes": [0],
        },
    },
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": REMOVE,
    },
    "granitemoehybrid": {
        "layer_types": _LINEAR_FULL,
        "num_hidden_layers": 2,
        "position_embedding_type": "rope",
    },
    "hrm_text": {"num_hidden_layers": 2, "head_dim": HEAD_DIM},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCABULARY,
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY, "n_layers_per_attn_res_block": 2},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
    },
    "laguna": _TWO_KINDS
    | {
        "num_attention_heads_per_layer": [HEADS, HEADS],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4": {
        "text_config": _CHUNKED,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "llama4_text": _CHUNKED,
    "longcat_flash": {"head_dim": 8, "num_key_value_heads": HEADS},
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2},
    "mellum": _TWO_KINDS | {"mlp_layer_types": ["sparse"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 2,
        "index_topk_blocks": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
    "ministral": {"head_dim": HEAD_DIM},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    "qwen2": _TWO_KINDS,
    "qwen2_moe": _TWO_KINDS,
    "qwen3": _TWO_KINDS,
    "qwen3_moe": {"num_hidden_layers": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": _DECODER
    | {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh", "local"],
        "num_hidden_layers": 3,
        "lsh_attn_chunk_length": WINDOW,
        "local_attn_chunk_length": WINDOW,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "roc_bert": _DECODER
    | {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
    },
    "smollm3": _TWO_KINDS | {"no_rope_layers": [1, 0]},
    "xlm": {
        "emb_dim": HIDDEN,
        "n_layers": 2,
        "n_heads": HEADS,
        "causal": True,
        "use_lang_emb": False,
    },
    "xlnet": {"attn_type": "uni", "n_layer": 2, "mem_len": None},
    "xlstm": {"chunk_size": WINDOW, "return_last_states": True},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _LINEAR_HYBRID,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _LINEAR_HYBRID,
        "num_key_value_heads": HEADS,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "num_experts": 4,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "num_hidden_layers": 3,
    },
}

_ENCODER = {"is_decoder": False}

ENCODER_EXCEPTIONS: Final[dict[str, dict[str, Any]]] = {
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3},
    "roc_bert": EXCEPTIONS["roc_bert"] | _ENCODER,
    "distilbert": {"dim": HIDDEN, "hidden_dim": FEED_FORWARD, "n_layers": 2, "n_heads": HEADS},
}
