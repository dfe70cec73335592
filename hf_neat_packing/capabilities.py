"""What a built model needs: its key resolved, its capabilities, its entry configured.

The layout of a batch is a lookup, not a list of names: the mask function that is registered for the model's
key decides. Hub kernels register one under their exact id when they are loaded, so they need no list either.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from ._compat import FlashAttentionKwargs
from .contract import (
    DOCUMENT_MAP_KEY,
    VARLEN_KEYS,
    PackingCapabilities,
    check_mask_type,
    requires_metadata,
)
from .errors import ContractError, UnsupportedModelError
from .hooks.metadata import (
    install_dense_mask_hook,
    install_native_fa4_metadata_hook,
    install_strip_metadata_hook,
    install_varlen_rebuild_hook,
    is_indexed_packed_mask,
    remove_entry_hook,
)
from .hooks.routing import leave_padding_out_of_routing
from .layer_masks import describe_layers
from .layouts import (
    backend_attention,
    config_key,
    declared_layout,
    reads_varlen_kwargs,
    registered_layout,
)
from .wrappers import forward_parameters, takes_any_keyword, unwrap

__all__ = [
    "configure_packing",
    "configure_packing_for_models",
    "get_attn_implementation",
    "get_model_attn_implementation",
    "get_packing_capabilities",
    "is_indexed_packed_mask",
    "model_capabilities",
    "validate_flash_packing_support",
]

NATIVE_FA4: Final = "fa4"


def get_model_attn_implementation(model: nn.Module) -> str:
    """Return the attention that a built model runs on `[batch, sequence]` tokens.

    A model that declares HF dispatch is read by its config; otherwise a typed `model.backend.attn`
    decides, then the config, then `sdpa`. In a composite config the text part's key counts.

    Args:
        model: the built model, in any number of wrappers.

    Returns:
        A custom backend's name or a transformers key; the id of a loaded hub kernel that stands in for a mainline
        flash key is returned as that key.

    Raises:
        TypeError: not a `torch.nn.Module`; a config says what was asked for, not what was built.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Got {type(model).__name__}, which is no torch.nn.Module. A packed batch follows the built model, "
            "because construction may choose another backend than its config asked for. Pass the model."
        )
    inner = unwrap(model)
    key = config_key(inner)
    backend = backend_attention(inner)
    if getattr(inner, "_uses_hf_attention", False) or backend is None:
        return key or "sdpa"
    return backend


def get_packing_capabilities(
    attn_implementation: str, model: nn.Module | None = None
) -> PackingCapabilities:
    """Look up what an attention implementation needs from a packed batch.

    A `packed_mask_type` that the model declares wins over the lookup. Has no side effects.

    Args:
        attn_implementation: from `get_model_attn_implementation`.
        model: the built model, or any object that carries its declarations.

    Returns:
        The capabilities, with the reasons in `trace`.

    Raises:
        ContractError: a key that nobody registered, a paged key, native FlashAttention-4 without a model that
            declares it, or an unknown declared mask type.
        UnsupportedModelError: windows that the model's 4-D masks cannot carry.
    """
    inner = unwrap(model) if model is not None else None
    metadata = requires_metadata(inner)
    if attn_implementation == NATIVE_FA4:
        _require_native_fa4(inner)
        capabilities = PackingCapabilities(
            "document_ids",
            requires_packed_sequence_metadata=True,
            uses_native_fa4=True,
            attention_key=attn_implementation,
            trace=(f"{type(inner).__name__} declares `_uses_native_fa4` and its backend is 'fa4'",),
        )
        return describe_layers(capabilities, inner)
    declared = getattr(inner, "packed_mask_type", None)
    if declared is None:
        layout, reason = registered_layout(attn_implementation, inner)
        capabilities = PackingCapabilities(
            "flash_varlen" if layout == "varlen" else "block_causal", layout=layout, trace=(reason,)
        )
    else:
        check_mask_type(declared)
        capabilities = PackingCapabilities(
            declared,
            layout=declared_layout(declared, attn_implementation),
            trace=(f"{type(inner).__name__} declares `packed_mask_type = {declared!r}`",),
        )
    capabilities = replace(
        capabilities,
        attention_key=attn_implementation,
        requires_packed_sequence_metadata=metadata,
    )
    return describe_layers(capabilities, inner)


def model_capabilities(model: nn.Module) -> PackingCapabilities:
    """Return what a built model needs from a packed batch: the one call that a collator makes.

    Args:
        model: the built model, in any number of wrappers. It is not changed.

    Raises:
        TypeError: not a module.
        ContractError: see `get_packing_capabilities`.
        UnsupportedModelError: the model cannot take packed rows as it is.
    """
    key = get_model_attn_implementation(model)
    capabilities = get_packing_capabilities(key, model)
    if capabilities.packed_mask_type == "flash_varlen":
        validate_flash_packing_support(key, model)
    return capabilities


def configure_packing(
    attn_implementation: str, model: nn.Module | None = None
) -> PackingCapabilities:
    """Prepare the entry of a model for packed batches and return their contract.

    One removable hook at the entry at most: native FlashAttention-4 gets the bundle flattened; models that
    read varlen kwargs get them rebuilt from the document map of each microbatch; the others get an unused bundle
    taken away, and document numbers refused where they read 4-D masks. Recurrent models read the bundle
    themselves and get no hook. A hook of an earlier call is replaced. Models with a router get hooks that leave
    padding out of its balance loss (`hooks.routing`).

    Args:
        attn_implementation: from `get_model_attn_implementation`.
        model: the built model.

    Returns:
        What the collator needs.

    Raises:
        ContractError: see `get_packing_capabilities`.
        UnsupportedModelError: (a `RuntimeError`) the model or transformers cannot take varlen kwargs.
    """
    capabilities = get_packing_capabilities(attn_implementation, model)
    if capabilities.packed_mask_type == "flash_varlen":
        validate_flash_packing_support(attn_implementation, model)
    if not isinstance(model, nn.Module):
        return capabilities
    leave_padding_out_of_routing(model)
    if capabilities.uses_native_fa4:
        install_native_fa4_metadata_hook(model)
    elif capabilities.requires_packed_sequence_metadata:
        remove_entry_hook(model)
    elif capabilities.packed_mask_type == "flash_varlen":
        install_varlen_rebuild_hook(model)
    elif capabilities.packed_mask_type == "block_causal":
        install_dense_mask_hook(model)
    else:
        install_strip_metadata_hook(model)
    return capabilities


def configure_packing_for_models(models: Sequence[nn.Module]) -> PackingCapabilities:
    """Configure the local pipeline stages and combine what they need from one batch.

    Args:
        models: the built stages of this rank; one model is a list of one.

    Returns:
        The common contract; metadata and `seq_idx` are added if any stage needs them.

    Raises:
        ContractError: no stage, or stages that read different layouts.
    """
    if not models:
        raise ContractError(
            "No model was given, so nothing says what a packed batch must hold. Pass the built stages of this "
            "rank: `configure_packing_for_models([model])`."
        )
    stages = [configure_packing(get_model_attn_implementation(model), model) for model in models]
    layouts = {(stage.packed_mask_type, stage.layout) for stage in stages}
    if len(layouts) > 1:
        found = [
            f"stage {i} ({type(unwrap(m)).__name__}, {s.attention_key}): {s.packed_mask_type} as {s.layout}"
            for i, (m, s) in enumerate(zip(models, stages, strict=True))
        ]
        raise ContractError(
            f"The stages read different layouts of one batch: {'; '.join(found)}. One of them would not see the "
            "boundaries. Give all stages the same `attn_implementation`."
        )
    return replace(
        stages[0],
        requires_packed_sequence_metadata=any(s.requires_packed_sequence_metadata for s in stages),
        uses_native_fa4=any(s.uses_native_fa4 for s in stages),
        requires_seq_idx=any(s.requires_seq_idx for s in stages),
        position_ids_start=max(s.position_ids_start for s in stages),
        trace=tuple(dict.fromkeys(reason for s in stages for reason in s.trace)),
    )


def validate_flash_packing_support(
    attn_implementation: str = "sdpa", model: nn.Module | None = None
) -> None:
    """Raise where varlen kwargs would not reach attention; other implementations need no check.

    Args:
        attn_implementation: from `get_model_attn_implementation`.
        model: the built model; skipped when None.

    Raises:
        UnsupportedModelError: (a `RuntimeError`) transformers lacks some of the kwargs, or the model's forward takes
            neither `**kwargs`, nor the document map, nor all four.
    """
    if not reads_varlen_kwargs(attn_implementation):
        return
    missing = [name for name in VARLEN_KEYS if name not in FlashAttentionKwargs.__annotations__]
    if missing:
        raise UnsupportedModelError(
            f"The installed transformers does not pass {missing} to attention, so offsets would vanish and the "
            f"documents of a row would see each other. Install a release with {list(VARLEN_KEYS)}."
        )
    if model is not None:
        _require_varlen_forward(unwrap(model))


def get_attn_implementation(cfg_model: Any) -> str:
    """Return the attention that a recipe's model section asks for: `backend.attn`, else `attn_implementation`.

    What was asked for may not be what was built; `get_model_attn_implementation` reads the built model.

    Args:
        cfg_model: a mapping-like section with attributes and `get`, or None.
    """
    requested = backend_attention(cfg_model)
    if requested is None and cfg_model is not None:
        requested = cfg_model.get("attn_implementation", "sdpa")
    return requested or "sdpa"


def _require_native_fa4(model: Any) -> None:
    if not getattr(model, "_uses_native_fa4", False):
        found = "no model was given" if model is None else f"{type(model).__name__} does not"
        raise ContractError(
            f"'fa4' means a model that calls FlashAttention-4 itself and declares `_uses_native_fa4 = True`; {found}. "
            "Its document map would be read as a padding mask. Inherit `NativeFA4Mixin`, or use the transformers key "
            "'flash_attention_4'."
        )


def _require_varlen_forward(model: Any) -> None:
    """Raise unless the forward of an unwrapped model takes boundaries; being able to is no proof of doing it."""
    name = type(model).__name__
    accepted = f"Accepted: `**kwargs`, `{DOCUMENT_MAP_KEY}`, or all of {list(VARLEN_KEYS)}."
    parameters = forward_parameters(model)
    if parameters is None:
        raise UnsupportedModelError(
            f"The signature of {name}.forward cannot be read, so nothing shows that it takes boundaries. {accepted}"
        )
    if takes_any_keyword(parameters) or DOCUMENT_MAP_KEY in parameters:
        return
    present = [key for key in VARLEN_KEYS if key in parameters]
    if len(present) < len(VARLEN_KEYS):
        missing = [key for key in VARLEN_KEYS if key not in parameters]
        raise UnsupportedModelError(
            f"{name}.forward names {present or 'none'} of the varlen kwargs and lacks {missing}: transformers ignores "
            f"an incomplete set, and the documents of a row would see each other. {accepted}"
        )
