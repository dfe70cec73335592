"""Tiny random models, each from a config of its own, with weights large enough that a leak shows."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    Qwen3Config,
)

import hf_neat_packing  # noqa: F401  (registers the key)

VOCAB = 97
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"]
_ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip

CONFIGS = {
    "llama": lambda: LlamaConfig(**_BASE),
    "qwen3": lambda: Qwen3Config(**_BASE, head_dim=8),
    "gemma2": lambda: Gemma2Config(
        **_BASE, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_BASE, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=_MIXED
    ),
    "mistral": lambda: MistralConfig(**_BASE, sliding_window=4),
    "gpt_oss": lambda: GptOssConfig(
        **_BASE, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
        layer_types=_MIXED, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mixtral": lambda: MixtralConfig(**_BASE, num_local_experts=2),
    "llama4": lambda: Llama4TextConfig(
        **_BASE, head_dim=8, attention_chunk_size=4, intermediate_size_mlp=64, num_local_experts=2
    ),
    "bert": lambda: BertConfig(**_ENCODER),
    "modernbert": lambda: ModernBertConfig(
        **_ENCODER, local_attention=4, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
}  # fmt: skip
ENCODERS = ("bert", "modernbert")


def tiny_model(
    name: str, key: str = "neat_varlen", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Build a tiny model in evaluation mode; the same name gives the same weights under every key."""
    config = CONFIGS[name]()
    auto = AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM
    torch.manual_seed(0)
    # Grouped expert kernels have no float64; the plain loop has every dtype.
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_local_experts") else {}
    model = auto.from_config(config, attn_implementation=key, dtype=torch.float32, **experts)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval().to(dtype)


def random_ids(lengths: list[int], seed: int = 0) -> torch.Tensor:
    """Random token ids `[1, T]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, sum(lengths)), generator=generator)
