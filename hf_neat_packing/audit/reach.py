"""What each attention layer was told about boundaries."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.mask_entry import LazyMask
from ..contract import DOCUMENT_MAP_KEY, VARLEN_KEYS
from ..wrappers import unwrap
from .batches import PackedInputs
from .running import forward


def boundaries_seen(model: nn.Module, packed: PackedInputs) -> dict[str, str]:
    """Run the batch once and say, for each attention layer, how boundaries reached it.

    Args:
        model: attention layers are the modules with a bool `is_causal`, as transformers'
            attention functions read it.
        packed: the batch.

    Returns:
        Name of the module -> how they came, or an empty string where nothing came.
    """
    seen: dict[str, str] = {}
    handles = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = seen.get(name) or boundary_evidence(args, kwargs, packed)

        return hook

    for name, module in unwrap(model).named_modules():
        if isinstance(getattr(module, "is_causal", None), bool) and name:
            handles.append(module.register_forward_pre_hook(watch(name), with_kwargs=True))
    try:
        with torch.no_grad():
            forward(model, packed.batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def boundary_evidence(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], packed: PackedInputs
) -> str:
    """Say how the arguments of an attention module keep documents apart; empty where they do not."""
    hidden = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim == 3]
    if hidden and hidden[0].shape[:2] != packed.document_map.shape:
        return "one document per row"
    flat = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim == 2]
    if not hidden and flat and flat[0].shape[0] != packed.document_map.numel():
        return "tokens of its own"  # a tower's
    if VARLEN_KEYS[0] in packed.batch:
        # Only then does the attention function of the model's key read them.
        if all(kwargs.get(name) is not None for name in VARLEN_KEYS):
            return "varlen offsets"
        if kwargs.get(DOCUMENT_MAP_KEY) is not None:
            return "document map"
    masks = [v for v in (kwargs.get("attention_mask"), *args) if isinstance(v, Tensor)]
    for mask in masks:
        if isinstance(mask, LazyMask):
            pattern = mask.recipe.pattern
            if pattern is not None and pattern.document_map is not None:
                return "restarting positions, read by the mask builder"
            if pattern is not None:
                continue
        if _keeps_apart(mask, packed.document_map):
            return "4-D mask"
    if type(kwargs.get("attention_mask")).__name__ == "BlockMask":
        return "block mask"
    return ""


def _keeps_apart(mask: Tensor, document_map: Tensor) -> bool:
    size = document_map.shape[1]
    if mask.ndim != 4 or mask.shape[-2:] != (size, size):
        return False
    ids = document_map
    foreign = (ids[:, :, None] != ids[:, None, :]) & (ids != 0)[:, :, None]
    # An additive mask hides with its dtype's lowest value; half of it is far beyond any score.
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool((allowed & foreign[:, None]).any())
