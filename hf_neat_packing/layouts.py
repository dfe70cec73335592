"""From an attention key to the layout of a batch: a lookup of the mask function registered for it."""

from typing import Any, Final

from ._compat import (
    attention_key,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    hub_kernel_mainline_name,
    known_attention_keys,
    registered_mask,
    sdpa_mask,
)
from .attention.mask_entry import neat_varlen_mask
from .contract import MaskLayout, PackedMaskType
from .errors import ContractError
from .layer_masks import text_config

# Words for `backend.attn` of AutoModel's own models that transformers does not know; they take a boolean mask.
_CUSTOM_BACKENDS: Final = ("te", "flex")

# A function and not its name decides, so a hub kernel is found under whatever id it was loaded by.
_LAYOUTS: Final[dict[Any, MaskLayout]] = {
    flash_attention_mask: "varlen",
    neat_varlen_mask: "varlen",
    sdpa_mask: "bool_4d",
    eager_mask: "additive_4d",
    flex_attention_mask: "block_mask",
}


def config_key(model: Any) -> str | None:
    """Read the key of a model's text part; the id of a hub kernel by the mainline key it stands in for.

    An id under which a kernel without a varlen function was loaded stays as it is.
    """
    config = getattr(model, "config", None)
    key = None if config is None else attention_key(text_config(config))
    if key is None or registered_mask(key) not in (None, flash_attention_mask):
        return key
    return hub_kernel_mainline_name(key) or key


def backend_attention(model: Any) -> str | None:
    """Read `model.backend.attn`, the typed choice of a custom model."""
    attention = getattr(getattr(model, "backend", None), "attn", None)
    return attention if isinstance(attention, str) else None


def reads_varlen_kwargs(key: str) -> bool:
    """Whether the attention of a key takes its boundaries as offsets."""
    return _LAYOUTS.get(registered_mask(key)) == "varlen"


def registered_layout(key: str, model: Any = None) -> tuple[MaskLayout, str]:
    """Look up the layout that the attention of a key reads, and say why.

    Args:
        key: a transformers key or a custom backend's name.
        model: the unwrapped model; its own `backend.attn` needs no registration.

    Raises:
        ContractError: a key whose form of boundaries is not known.
    """
    mask = registered_mask(key)
    if mask is not None and mask in _LAYOUTS:
        return _LAYOUTS[mask], f"transformers has {mask.__name__} registered for {key!r}"
    own = backend_attention(model) == key and not getattr(model, "_uses_hf_attention", False)
    if mask is None and (own or key in _CUSTOM_BACKENDS):
        return "bool_4d", f"{key!r} is a custom backend, and those take a boolean block-causal mask"
    if key.startswith("paged|"):
        raise ContractError(
            f"{key!r} reads a paged cache of generation and knows no documents in a row, so packed training would mix "
            f"them. Use {key.removeprefix('paged|')!r} or 'neat_varlen' for training."
        )
    if mask is not None:
        found = f"with the mask function {getattr(mask, '__name__', mask)!r}, whose form of mask is not known here"
    elif hub_kernel_mainline_name(key) is not None or "/" in key:
        found = "but no kernel was loaded under this id, so how it takes boundaries is unknown; load the model with it"
    else:
        found = "but nobody registered a mask function for it, so transformers would build no mask at all"
    raise ContractError(
        f"The attention key is {key!r}, {found}. A batch in a guessed form would let documents see each other. "
        f"Accepted: {[k for k in known_attention_keys() if registered_mask(k)]} and loaded hub kernels; or "
        "`model.set_attn_implementation('neat_varlen')`."
    )


def declared_layout(declared: PackedMaskType, key: str) -> MaskLayout | None:
    """The layout of a mask type that the model declares itself; None stands for the plain one."""
    if declared != "block_causal":
        return None
    layout = _LAYOUTS.get(registered_mask(key), "bool_4d")
    return "bool_4d" if layout == "varlen" else layout
