"""What the layers of a built model put over their documents, read from its config and modules.

A 4-D mask is used as it is by every layer that gets it, so windows and chunks must be in it. Whether
a model takes one mask per layer type is read from its own forward; where it takes only one but has
several patterns, one mask would be wrong in some layers and the model is refused by name.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn

from ._compat import attention_key, mask_kinds
from .contract import LayerMask, MaskDelivery, PackingCapabilities
from .errors import UnsupportedModelError

# Layer types before transformers gave them an entry among the mask patterns.
_EARLIER_KINDS = {
    "attention": "full",
    **dict.fromkeys(("linear_attention", "conv", "mamba", "recurrent", "hybrid"), "recurrent"),
}

# Layers without attention or state between tokens, which take no mask.
_POINTWISE = ("moe", "mlp")

# Names of cross-attention modules in decoders of encoder-decoder families.
_CROSS_ATTENTION = frozenset({"encoder_attn", "crossattention", "cross_attn", "EncDecAttention"})


def describe_layers(capabilities: PackingCapabilities, model: Any) -> PackingCapabilities:
    """Add to the capabilities of a model what the collator reads from its config and modules.

    Args:
        capabilities: mask type and layout; mask patterns are read for 4-D masks only.
        model: the unwrapped model; without a config nothing is added.

    Raises:
        UnsupportedModelError: an encoder-decoder, or patterns that the model's 4-D masks cannot carry.
    """
    config = getattr(model, "config", None)
    if config is None:
        return capabilities
    text = text_config(config)
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder: it has two rows of documents and cross-attention between "
            "them, which one document map cannot keep apart. Accepted: decoder-only and encoder-only models."
        )
    trace = capabilities.trace
    if text is not config and attention_key(text) != attention_key(config):
        trace += (
            f"the text part runs {attention_key(text)!r}, the whole {attention_key(config)!r}",
        )
    masks = {}
    if capabilities.packed_mask_type == "block_causal":
        found, delivery = layer_masks(model, text)
        masks = {
            "layer_masks": found,
            "mask_delivery": delivery,
            "is_causal": is_causal(model, text),
        }
    return replace(
        capabilities,
        **masks,  # type: ignore[arg-type]
        requires_seq_idx=has_recurrent_layers(model, text),
        mask_dtype=mask_dtype(model),
        position_ids_start=position_ids_start(model),
        trace=trace,
    )


def text_config(config: Any) -> Any:
    """Return the config of the part that reads tokens; a composite one keeps its key apart.

    Falls back to the config itself where transformers finds several text parts, or none with a key.
    """
    getter = getattr(config, "get_text_config", None)
    if getter is None:
        return config
    try:
        text = getter()
    except ValueError:
        return config
    return text if attention_key(text) is not None else config


def layer_types(config: Any) -> tuple[str, ...]:
    """List the distinct layer types of a text config, in the order of the layers; often empty."""
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if types:
            return tuple(dict.fromkeys(types))
    return ()


def has_recurrent_layers(model: Any, config: Any) -> bool:
    """Whether some layer carries state from token to token, which a mask cannot stop."""
    if getattr(model, "_is_stateful", False):
        return True
    return any("recurrent" in _kinds(layer_type).values() for layer_type in layer_types(config))


def layer_masks(model: Any, config: Any) -> tuple[tuple[LayerMask, ...], MaskDelivery]:
    """Read the mask patterns of the layers and how the model takes 4-D masks.

    Args:
        model: the unwrapped model.
        config: its text config.

    Returns:
        One entry per layer type, and the delivery.

    Raises:
        UnsupportedModelError: several patterns but only one mask, or a pattern that is not known.
    """
    types = layer_types(config)
    if not types:
        for kind, name in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
            if size := getattr(config, name, None):
                mask = LayerMask(layer_type=f"{kind}_attention", kind=kind, size=size)  # type: ignore[arg-type]
                return (mask,), "windowed"
        return (LayerMask(),), "single"
    kinds: dict[str, str] = {}
    for layer_type in types:
        kinds.update(_kinds(layer_type))
    masks = tuple(_layer_mask(model, config, name, kind) for name, kind in kinds.items())
    patterns = {(mask.kind, mask.size) for mask in masks if mask.kind != "recurrent"}
    if len(patterns) <= 1:
        return masks, "windowed" if patterns - {("full", None)} else "single"
    if not _takes_mask_per_layer_type(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of types {list(types)} but its forward takes one 4-D mask for all of "
            "them: the windows of the others would vanish without a word. Accepted: a key that reads offsets. Load the "
            'model with `attn_implementation="neat_varlen"` (after `import hf_neat_packing`).'
        )
    return masks, "dict"


def is_causal(model: Any, config: Any) -> bool:
    """Whether the attention layers of the text part see earlier tokens only.

    Raises:
        UnsupportedModelError: causal and bidirectional layers in one text part.
    """
    if not isinstance(model, nn.Module):
        return True
    found = {
        module.is_causal
        for name, module in model.named_modules()
        if getattr(module, "config", None) is config
        and isinstance(getattr(module, "is_causal", None), bool)
        # A decoder that stands alone still carries the modules that would look at an encoder.
        and not _CROSS_ATTENTION.intersection(name.split("."))
    }
    if len(found) == 2:
        raise UnsupportedModelError(
            f"{type(model).__name__} has causal and bidirectional attention layers, which one 4-D mask cannot serve. "
            'Load it with `attn_implementation="neat_varlen"`, where each layer decides by itself.'
        )
    return found != {False}


def mask_dtype(model: Any) -> torch.dtype:
    """The dtype in which the model adds masks to its scores: that of its first floating parameter."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.float32


def position_ids_start(model: Any) -> int:
    """Position of a document's first token: tables with a padding entry count from behind it.

    Source: `RobertaEmbeddings` of transformers, whose table keeps `padding_idx` for padding.
    """
    if not isinstance(model, nn.Module):
        return 0
    for name, module in model.named_modules():
        # Tables of a type of their own (OPT, BART) add their offset inside.
        is_table = type(module) is nn.Embedding and "position" in name.rpartition(".")[2]
        if is_table and isinstance(module.padding_idx, int):
            return module.padding_idx + 1
    return 0


def _kinds(layer_type: str) -> dict[str, str]:
    if layer_type in _POINTWISE:
        return {}
    known = mask_kinds(layer_type)
    if known is None:
        return {layer_type: _EARLIER_KINDS.get(layer_type, "unknown")}
    return known


def _layer_mask(model: Any, config: Any, layer_type: str, kind: str) -> LayerMask:
    size = {
        "sliding": getattr(config, "sliding_window", None),
        "chunked": getattr(config, "attention_chunk_size", None),
    }.get(kind)
    if kind not in ("full", "sliding", "chunked", "recurrent") or (
        kind in ("sliding", "chunked") and not size
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {layer_type!r}, whose mask pattern ({kind}, size {size}) "
            "is not known here; a guessed mask would be wrong without a word. Accepted: full, sliding and chunked "
            'attention, or a key that reads offsets: `attn_implementation="neat_varlen"`.'
        )
    return LayerMask(layer_type=layer_type, kind=kind, size=size)  # type: ignore[arg-type]


def _takes_mask_per_layer_type(model: Any) -> bool:
    """Whether some forward of the model asks whether its mask is a dict.

    There is no declaration for it; asking the forward's own code stays true across releases.
    """
    if not isinstance(model, nn.Module):
        return False
    types = {type(module) for module in model.modules()}
    codes = [getattr(inspect.unwrap(cls.forward), "__code__", None) for cls in types]
    return any(
        code is not None
        and {"isinstance", "dict"} <= set(code.co_names)
        and any(str(constant).endswith("_attention") for constant in _constants(code))
        for code in codes
    )


def _constants(code: CodeType) -> Iterator[Any]:
    pending: list[Any] = list(code.co_consts)
    while pending:
        constant = pending.pop()
        if isinstance(constant, tuple):
            pending += constant
        elif isinstance(constant, CodeType):
            pending += constant.co_consts
        else:
            yield constant
