"""Tiny configs: a model type's own config class, shrunk, with one layer of each kind."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .zoo_sizes import EXCEPTIONS, FEED_FORWARD, FIRST_SPECIAL_ID, HEADS, REMOVE, SIZES, WINDOW

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_LAYERS = 8

# Composite types whose text decoder is what the auto mapping builds.
_DECODER_ONLY = ("musicgen", "musicgen_melody")

# Drafters: tiny targets that share their key-value states.
_DRAFTERS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}


def tiny_config(
    model_type: str, exceptions: Mapping[str, Any] | None = None, **options: Any
) -> PreTrainedConfig:
    """Make a model type's own config, tiny, with dropout 0.

    Args:
        model_type: a key of transformers' config mapping.
        exceptions: fields that differ from the usual sizes; default: those of the causal LM.
        options: passed to the config as they are, such as `attn_implementation`.

    Raises:
        KeyError: a model type that transformers does not know.
        ValueError: the config refuses its sizes; a library that the config needs may be missing.
    """
    cls = CONFIG_MAPPING[model_type]
    chosen = EXCEPTIONS.get(model_type, {}) if exceptions is None else exceptions
    if model_type in _DRAFTERS:
        target = _DRAFTERS[model_type]
        text = tiny_config(
            target,
            EXCEPTIONS[target]
            | {
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "num_kv_shared_layers": 4,
            },
        )
        drafter = {"num_centroids": 8, "centroid_intermediate_top_k": 2}
        return cls(text_config=text, backbone_hidden_size=text.hidden_size, **drafter, **options)
    if model_type in _DECODER_ONLY:
        cls = type(cls().decoder)
    return cls(**_shrink(cls, chosen), **options)


def _shrink(cls: type[PreTrainedConfig], exceptions: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the arguments that make a config of this class tiny."""
    default, values = _defaults(cls)
    tiny = _small_values(values)
    _short_windows(values, tiny)
    tiny |= _one_layer_of_each_kind(default, values)
    parts = getattr(default, "sub_configs", None) or {}
    for name in parts:
        part = _read(default, name)
        # Towers that are made from given sizes only are left to the exceptions.
        if part is None or isinstance(part, (dict, str)) or _gives_sizes(exceptions.get(name)):
            continue
        own = exceptions.get(name)
        tiny[name] = _shrink(type(part), own if isinstance(own, dict) else {})
        tiny[name]["model_type"] = type(part).model_type
    for name, value in exceptions.items():
        if value is REMOVE:
            tiny.pop(name, None)
        elif name in parts and isinstance(value, dict):
            tiny[name] = tiny.get(name, {}) | value
        else:
            tiny[name] = value
    return tiny


def _gives_sizes(exceptions: Any) -> bool:
    return isinstance(exceptions, dict) and set(exceptions) == {"adapter_out_dim"}


def _defaults(cls: type[PreTrainedConfig]) -> tuple[Any, dict[str, Any]]:
    """Read the fields of a config class; some configs cannot be made without arguments."""
    try:
        default: Any = cls()
    except Exception:
        default = cls
    if not dataclasses.is_dataclass(cls):
        return default, dict(vars(default))
    fields = dataclasses.fields(cls)
    values = {field.name: _read(default, field.name) for field in fields}
    for field in fields:
        if values[field.name] is None and field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    return default, values


def _read(config: Any, name: str) -> Any:
    """Read a field past the properties that some configs compute and that raise."""
    try:
        return getattr(config, name, None)
    except Exception:
        value = vars(config).get(name)
        return value if value is not None else type(config).__dict__.get(name)


def _small_values(values: Mapping[str, Any]) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    special_id = FIRST_SPECIAL_ID
    for name, value in values.items():
        if isinstance(value, bool) or value is None:
            continue
        if name.endswith(("token_id", "token_index")) and name not in SIZES:
            if isinstance(value, int):
                tiny[name] = special_id
                special_id += 1
        elif name in SIZES and isinstance(value, (int, list, tuple)):
            # Zero shared experts is another architecture, not a size.
            if name != "shared_intermediate_size" or value != 0:
                tiny[name] = SIZES[name]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            tiny[name] = 0.0
    return tiny


def _short_windows(values: Mapping[str, Any], tiny: dict[str, Any]) -> None:
    """Switch windows on: an audit without them would not see one that is lost."""
    if "sliding_window" in values and values["sliding_window"] is None:
        tiny["sliding_window"] = WINDOW
    if "use_sliding_window" in values:
        tiny["use_sliding_window"] = True
    if "kv_lora_rank" in values and "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = HEADS


def _one_layer_of_each_kind(default: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Cut lists that have one entry per layer to one layer of each kind."""
    for count_name in _LAYER_COUNTS:
        count = _read(default, count_name)
        if isinstance(count, int):
            break
    else:
        return {}
    lists = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and count > 4 and len(value) == count
    }
    if not lists:
        return {}
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)]
    layers = sorted({kind: kinds.index(kind) for kind in kinds}.values())[:_MOST_LAYERS]
    if len(layers) < 2:
        layers *= 2
    cut = {name: [value[layer] for layer in layers] for name, value in lists.items()}
    if "intermediate_size" in cut:
        cut["intermediate_size"] = [FEED_FORWARD] * len(layers)
    return {**cut, count_name: len(layers)}
