"""Repairs of attention modules that compute their scores from a mask: other documents hidden in it.

Legend: `B` rows, `S` tokens in a row.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import attention_key
from ..attention.mask_entry import LazyMask
from ..errors import UnsupportedModelError
from ..hooks.running import RowLayout
from ..wrappers import forward_parameters
from .base import Arguments, Removable, Repair


class MaskOtherDocuments(Repair):
    """Hide other documents in the mask that an attention module gets, and write it as scores to add."""

    name = "mask of other documents added in attention"
    cost = "a mask of the squared row length per forward"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put a pre-hook on a module that takes a mask."""
        return [module.register_forward_pre_hook(self._mask, with_kwargs=True)]

    def _mask(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        found = mask_argument(module, args, kwargs)
        if found is None:
            return None
        name, place, mask = found
        layout = self.layout(kwargs)
        if (layout is None or layout.one_document_a_row) and not isinstance(mask, LazyMask):
            return None
        hidden = _first_float(args, kwargs)
        added = self._additive(module, mask, layout, hidden)
        if place is None:
            return args, kwargs | {name: added}
        return (*args[:place], added, *args[place + 1 :]), kwargs

    def _additive(
        self, module: nn.Module, mask: Any, layout: RowLayout | None, hidden: Tensor
    ) -> Tensor:
        if isinstance(mask, LazyMask):
            mask = mask.recipe.dense()
        if layout is not None and not layout.one_document_a_row:
            same = layout.same_document(hidden.device)
            if mask is None:
                causal = getattr(module, "is_causal", True)
                mask = same.tril() if causal else same
            elif mask.dtype == torch.bool:
                mask = mask & same
            else:
                return mask.masked_fill(~same, torch.finfo(mask.dtype).min)  # type: ignore[no-any-return]
        if mask.dtype != torch.bool:
            return mask  # type: ignore[no-any-return]
        zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
        return zeros.masked_fill(~mask, torch.finfo(hidden.dtype).min)


class MarkOtherDocuments(MaskOtherDocuments):
    """Hide other documents in a mask that says True for what is hidden."""

    name = "mask of other documents, True where hidden, in attention"

    def _additive(
        self, module: nn.Module, mask: Any, layout: RowLayout | None, hidden: Tensor
    ) -> Tensor:
        return super()._additive(module, mask, layout, hidden) != 0


class OwnAttention(MaskOtherDocuments):
    """Run an attention module by the model's own eager attention, where its key does not do what it asks for."""

    name = "runs by the model's own eager attention, with a mask of other documents"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Give a module a config of its own, and put the pre-hook of the mask on it."""
        return [*super().attach(module), _EagerConfig(module)]


class _EagerConfig:
    """A module's config, and those of its parts, exchanged for copies that say `eager`."""

    def __init__(self, module: nn.Module) -> None:
        self._before: list[tuple[Any, Any]] = [
            (part, vars(part)["config"])
            for part in module.modules()
            if attention_key(vars(part).get("config")) is not None
        ]
        for part, config in self._before:
            own = copy.deepcopy(config)
            own.update({"_attn_implementation": "eager"})
            part.config = own

    def remove(self) -> None:
        """Put the configs back."""
        for part, config in self._before:
            part.config = config
        self._before.clear()


def mask_argument(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, int | None, Any] | None:
    """Find the mask among the arguments: `(name, place or None, value)`."""
    names = list(forward_parameters(module) or {})
    for place, value in enumerate(args):
        name = names[place] if place < len(names) else ""
        if isinstance(value, LazyMask) or (_is_mask_name(name) and is_square(value)):
            return name, place, value
    for name, value in kwargs.items():
        if isinstance(value, LazyMask) or (_is_mask_name(name) and is_square(value)):
            return name, None, value
    for place, name in enumerate(names):
        if _is_mask_name(name):
            return name, place if place < len(args) else None, None
    return None


def _is_mask_name(name: str) -> bool:
    return "attention_mask" in name or name in ("mask", "attn_mask")


def is_square(value: Any) -> bool:
    """Whether a value is a 4-D mask or score bias of a whole row."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == value.shape[-2]


def _first_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise UnsupportedModelError("an attention module was called without any floating tensor")


def takes_lazy_mask(arguments: Arguments) -> bool:
    """Whether a call was handed the lazy mask of `neat_varlen`."""
    args, kwargs = arguments
    return any(isinstance(value, LazyMask) for value in (*args, *kwargs.values()))
