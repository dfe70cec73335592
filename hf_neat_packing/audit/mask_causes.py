"""Where the mask of an attention that mixes documents comes from: told by watching one more forward.

Under `neat_varlen` transformers' mask builder returns a mask that says how it was built (`LazyMask`). If the
modules are handed one, the builder made it, and whether the model gave it a padding mask is written on it.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attention import ATTENTION_KEY
from ..attention.mask_entry import LazyMask, MaskRecipe
from ..isolation.conditions import under_key
from ..wrappers import unwrap
from .batches import PackedInputs
from .causes import (
    CACHE,
    MASK_IN_BATCH,
    MASK_OF_ALL_ONES,
    MASK_WITHOUT_BOUNDARIES,
    OWN_MASK_CODE,
    Cause,
)
from .running import forward


def mask_cause(model: nn.Module, packed: PackedInputs) -> Cause:
    """Say why the mask of a model's attention does not keep documents apart.

    Args:
        model: run once or twice, without a mask in the batch; what it raises is left aside.
        packed: the batch.

    Returns:
        No positions for the mask builder (M0), a padding mask of ones that the model makes for it (M1) or the batch
        brings, a cache, or no mask of the builder (M2).
    """
    recipes, ones = _recipes(model, packed, cached=False)
    if not recipes:
        return MASK_OF_ALL_ONES if ones else OWN_MASK_CODE
    if any(recipe.attention_mask is not None for recipe in recipes):
        return MASK_OF_ALL_ONES
    if not _find_documents(recipes):
        return MASK_WITHOUT_BOUNDARIES
    given = packed.batch.get("attention_mask")
    if isinstance(given, Tensor) and given.ndim == 2:
        return MASK_IN_BATCH
    return OWN_MASK_CODE if _find_documents(_recipes(model, packed, cached=True)[0]) else CACHE


def _find_documents(recipes: Sequence[MaskRecipe]) -> bool:
    patterns = [recipe.pattern for recipe in recipes]
    return any(pattern is not None and pattern.document_map is not None for pattern in patterns)


def _recipes(
    model: nn.Module, packed: PackedInputs, *, cached: bool
) -> tuple[list[MaskRecipe], bool]:
    """Collect how the masks were built that modules are handed, and whether a mask of ones was made."""
    batch = {name: value for name, value in packed.batch.items() if name != "attention_mask"}
    found: list[MaskRecipe] = []

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.extend(v.recipe for v in (*args, *kwargs.values()) if isinstance(v, LazyMask))

    inner = unwrap(model)
    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True) for module in inner.modules()
    ]
    ones = _Ones(tuple(packed.document_map.shape))
    try:
        # An attention of the model's own may break on the mask; it was handed one then.
        with suppress(Exception), torch.no_grad(), under_key(inner, ATTENTION_KEY), ones:
            forward(model, batch, cached=cached)
    finally:
        for handle in handles:
            handle.remove()
    return found, ones.made


class _Ones(TorchFunctionMode):
    """Watches whether a tensor of ones of a shape is made inside."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.made = shape, False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        makes_ones = func in (torch.ones, torch.ones_like, Tensor.new_ones)
        if makes_ones and tuple(result.shape) == self.shape:
            self.made = True
        return result
