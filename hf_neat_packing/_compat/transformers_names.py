"""What is used of transformers: its registries of attention and masks, and the collator that ours extends."""

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedTransformersError

TESTED_TRANSFORMERS = ("5.6.0", "5.24.0")

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        DataCollatorWithFlattening,
        PreTrainedConfig,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        flash_attention_mask,
        flex_attention_mask,
        sdpa_mask,
    )
    from transformers.modeling_flash_attention_utils import (
        FLASH_ATTN_KERNEL_FALLBACK,
        FlashAttentionKwargs,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise UnsupportedTransformersError(
        f"hf_neat_packing stands on a name that the installed transformers lacks: {error}. It is tested with "
        f"transformers {TESTED_TRANSFORMERS[0]} to {TESTED_TRANSFORMERS[1]}. Install one of these: "
        f'pip install "transformers>={TESTED_TRANSFORMERS[0]}".'
    ) from error

__all__ = [
    "TESTED_TRANSFORMERS",
    "DataCollatorWithFlattening",
    "FlashAttentionKwargs",
    "PreTrainedConfig",
    "attention_key",
    "bidirectional_mask_function",
    "causal_mask_function",
    "eager_mask",
    "flash_attention_mask",
    "flex_attention_mask",
    "hub_kernel_mainline_name",
    "known_attention_keys",
    "mask_kinds",
    "register_attention",
    "registered_attention",
    "registered_mask",
    "sdpa_attention_forward",
    "sdpa_mask",
]


def attention_key(config: Any) -> str | None:
    """Read the dispatch key of a config; transformers has no public getter (drop when it has)."""
    key = getattr(config, "_attn_implementation", None)
    return key if isinstance(key, str) else None


def register_attention(
    key: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> None:
    """Register an attention function and its mask function under one key."""
    AttentionInterface.register(key, attention)
    if mask is not None:
        AttentionMaskInterface.register(key, mask)


def registered_mask(key: str) -> Callable[..., Any] | None:
    """Return the mask function registered for a key, or None."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(key)  # type: ignore[no-any-return]


def registered_attention(key: str) -> Callable[..., Any] | None:
    """Return the attention function registered for a key, or None (`eager` has none)."""
    return ALL_ATTENTION_FUNCTIONS.get(key)  # type: ignore[no-any-return]


def known_attention_keys() -> list[str]:
    """List the keys that a config may hold, sorted."""
    return sorted({"eager", *ALL_ATTENTION_FUNCTIONS.keys()})


def hub_kernel_mainline_name(key: str) -> str | None:
    """Name the mainline key that a hub kernel id (`org/name[@revision][:function]`) stands in for."""
    repository = key.partition(":")[0].partition("@")[0]
    return next((n for n, r in FLASH_ATTN_KERNEL_FALLBACK.items() if r == repository), None)


def mask_kinds(layer_type: str) -> dict[str, str] | None:
    """Name the mask pattern behind each mask that a layer type takes; None where it has no entry."""
    kinds = {"causal": "full", "sliding": "sliding", "chunked": "chunked", "recurrent": "recurrent"}
    entry = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(layer_type)
    parts = entry if isinstance(entry, dict) else {layer_type: entry}
    names = {part: getattr(getattr(f, "func", f), "__name__", "") for part, f in parts.items()}
    return {p: kinds.get(n.split("_")[1], n) for p, n in names.items()} if entry else None
