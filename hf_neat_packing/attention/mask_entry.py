"""The mask entry of `neat_varlen`: a mask that is described, and built only for who needs it dense.

Transformers builds one mask per layer type and forward, before attention runs, and does not show the
mask function the packing kwargs of the call. So the entry returns a `LazyMask`: a bool tensor of the
right shape without storage, that remembers how to be built. The attention function reads its pattern
(window, chunk, documents) and never builds it; any other operation, in any model, builds exactly the
mask that `sdpa` would have got.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import (
    MaskPattern,
    chunks_follow_positions,
    is_tracing,
    mask_pattern,
    plain_torch_function,
    sdpa_mask,
    tables_by_row,
    tree_map,
    wrapper_tensor,
)

_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
# Where a mask of a compiled graph remembers the window that it was built of.
LOCAL_SIZE = "neat_varlen_local_size"
# The size of its chunks, where transformers has counted them from the start of the row.
CHUNK = "neat_varlen_chunk"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into the one that eager attention adds to its scores.

    Args:
        mask: bool, True = may attend.
        dtype: floating dtype of the scores.

    Returns:
        0 where a token may attend and the lowest finite value elsewhere: an infinite one would make
        NaN in a row without an allowed key.
    """
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


class MaskRecipe:
    """How to build one mask of one forward, whole or in parts.

    Attributes:
        attention_mask: the 2-D padding mask of the call, bool `[B, S]`, or None.
        pattern: what the mask function lets a query see, or None where only evaluating it tells.
        boundaries: a place where the attention function keeps what it found out about this
            forward's documents, so that the next layer does not look again.
    """

    def __init__(
        self,
        mask_function: Callable[..., Any],
        attention_mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        self.attention_mask = attention_mask
        self.pattern: MaskPattern | None = mask_pattern(mask_function)
        self.boundaries: Any = None
        self._mask_function = mask_function
        self._arguments = arguments
        self._as_sdpa: tuple[Tensor | None] | None = None

    def as_sdpa(self) -> Tensor | None:
        """Build what `sdpa` would get, once: None where its `is_causal` flag or no mask says the same."""
        if self._as_sdpa is None:
            self._as_sdpa = (self._build(self._arguments),)
        return self._as_sdpa[0]

    def dense(self) -> Tensor:
        """Build the whole mask, bool `[B, 1, S, S]`."""
        arguments = self._arguments | {
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        mask = self._build(arguments)
        assert mask is not None
        return mask

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Build the whole mask as eager attention adds it: 0 or the lowest finite value, `[B, 1, S, S]`."""
        return additive(self.dense(), dtype)

    def block(self, start: int, stop: int) -> Tensor:
        """Build the mask of the tokens `start:stop` of the flattened batch among themselves.

        Returns:
            bool `[1, 1, L, L]`; the tokens lie in one row.
        """
        row, first = divmod(start, self._arguments["q_length"])
        length = stop - start
        mask_function = tables_by_row(self._mask_function)

        def in_row(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return mask_function(batch + row, head, query, key)

        mask = self._build(
            self._arguments
            | {
                "batch_size": 1,
                "q_length": length,
                "kv_length": length,
                "q_offset": first,
                "kv_offset": first,
                "mask_function": in_row,
                "attention_mask": None,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )
        assert mask is not None
        return mask

    def _build(self, arguments: dict[str, Any]) -> Tensor | None:
        arguments = {
            "mask_function": self._mask_function,
            "attention_mask": self.attention_mask,
        } | arguments
        return sdpa_mask(**arguments)  # type: ignore[no-any-return]


class LazyMask(Tensor):
    """A bool mask `[B, 1, S, S]` without storage; its `recipe` builds it when an operation needs values."""

    recipe: MaskRecipe

    @staticmethod
    def __new__(cls, recipe: MaskRecipe, shape: tuple[int, ...], device: Any) -> "LazyMask":
        """Make the mask; it has a shape, a dtype and a device, and no values yet."""
        mask = wrapper_tensor(cls, shape, device)
        assert isinstance(mask, LazyMask)
        mask.recipe = recipe
        return mask

    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep the mask lazy through operations that change nothing; build it for every other one."""
        if func in _ALIASES or (func is torch.ops.aten.slice.Tensor and _keeps_everything(*args)):
            mask = args[0]
            return LazyMask(mask.recipe, tuple(mask.shape), mask.device)

        dtype = _dtype_of_scores(args) if func in _ADDITIONS else None

        def build(value: Any) -> Any:
            if not isinstance(value, LazyMask):
                return value
            return value.recipe.dense() if dtype is None else value.recipe.additive(dtype)

        args, kwargs = tree_map(build, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)}, pattern={self.recipe.pattern})"


def _dtype_of_scores(operands: Any) -> torch.dtype | None:
    """A model with an attention of its own adds the mask to its scores; True would then add 1 and mask nothing."""
    for operand in operands:
        if isinstance(operand, Tensor) and operand.is_floating_point():
            return operand.dtype
    return None


def _keeps_everything(
    mask: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    """Models slice the mask to the key length; in a forward without a cache that changes nothing."""
    size = mask.shape[dim]
    return start in (None, 0) and (end is None or end >= size) and step == 1


def neat_varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Describe the mask of a whole forward; with a cache or while tracing, build what `sdpa` builds.

    Args:
        batch_size: rows.
        q_length: queries of the call.
        kv_length: keys of the call.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: transformers' index-based mask function.
        attention_mask: bool padding mask `[B, S]`.
        device: where the mask is needed.
        **kwargs: what transformers passes on to `sdpa_mask`, plus arguments that only other
            backends read.

    Returns:
        A `LazyMask`, or what `sdpa_mask` returns.
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "device": device,
    } | kwargs
    if mask_function is not None:
        whole_row = q_length == kv_length > 1 and not isinstance(q_offset, Tensor)
        if whole_row and q_offset == kv_offset == 0 and not is_tracing():
            recipe = MaskRecipe(mask_function, attention_mask, arguments)
            return LazyMask(recipe, (batch_size, 1, q_length, kv_length), device)
        arguments["mask_function"] = mask_function
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **arguments)
    if mask is not None and is_tracing() and not kwargs.get("use_vmap"):
        # What the graph may take for granted, and then checks on the device.
        size = kwargs.get("local_size")
        setattr(mask, LOCAL_SIZE, size)
        chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
        if chunk is not None and size == chunk and not chunks_follow_positions():
            setattr(mask, CHUNK, chunk)
    return mask
