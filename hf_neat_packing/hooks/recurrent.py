"""Layers that carry state from token to token, run once per document through removable hooks.

A pre-hook moves the documents of a row into padded calls of near lengths (`regroup`), the layer runs on each
as on a batch of separate documents, and a hook moves the outputs back. Nothing is asked of the layer
but that it is causal. Boundaries are those of the running forward (`running`), in the backward's
recomputation too; where they are lost the layer raises and never runs on a row as if it were one document.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.mask_entry import LazyMask
from ..errors import UnsupportedModelError
from .entry import ModelEntry
from .regroup import (
    Call,
    Groups,
    Regrouping,
    cut_mask,
    is_per_token,
    near_lengths,
    put,
    regroup,
    take,
)
from .running import BOUNDARY_KEYS, Frame, RowLayout, Scope, pop, push, read_layout, running, top

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Running(NamedTuple):
    """What a module was called with, and the calls that it became."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Regrouping


class PerDocument:
    """Hooks that run a module once per document.

    Args:
        scope: whose forwards say where the documents are.
        groups: which documents share a call.
        masks: what becomes of an attention mask of the row: `drop` it, as recurrent layers need none,
            or `cut` the documents' blocks out of it.
        needed: says for which layouts the module must be run per document; default: for all.
        within_rows: whether rows of one document each need it too, because the module looks across rows.
        before: called with the module and its arguments before the first call.
    """

    def __init__(
        self,
        scope: Scope,
        *,
        groups: Groups = near_lengths,
        masks: Literal["drop", "cut"] = "drop",
        needed: Callable[[nn.Module, RowLayout], bool] | None = None,
        within_rows: bool = False,
        before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        self.scope, self.groups, self.masks = scope, groups, masks
        self.needed, self.within_rows, self.before = needed, within_rows, before

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on a module.

        Returns:
            The handles; removing them leaves the module as it was.
        """
        return [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        layout = self._layout(module, args, kwargs)
        if layout is None:
            return None
        if self.needed is not None and not self.needed(module, layout):
            return None
        if layout.one_document_a_row and not self.within_rows:
            # Nothing to separate; but kernels that are not installed refuse boundaries even then.
            return self._bare(args, kwargs, layout) if self.masks == "drop" else None
        if not any(is_per_token(value, layout) for value in (*args, *kwargs.values())):
            raise UnsupportedModelError(
                f"{type(module).__name__} was to be run per document, but none of its inputs is a tensor of "
                f"[{layout.rows}, {layout.row_length}, ...]. Its documents would see each other. Remove its hook, or "
                "hook a module around it."
            )
        device = _device(args, kwargs)
        plan = regroup(layout, self.groups, device)
        if self.before is not None:
            push(Frame(self.scope, module, plan.calls[0].layout, regrouped=True))
            try:
                self.before(module, args, kwargs)
            finally:
                pop()
        push(Frame(self.scope, module, plan.calls[0].layout, _Running(args, kwargs, plan), True))
        return self._arguments(args, kwargs, plan.calls[0], layout)

    def _layout(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RowLayout | None:
        frame = running(self.scope)
        if frame is None:
            layout = read_layout(kwargs, _rows_and_length(args, kwargs))
            if layout is not None:
                return layout
            raise UnsupportedModelError(
                f"{type(module).__name__} runs once per document, and was called outside of a forward of its model (or "
                "by a checkpointing function that recomputes activations on its own): where the documents begin is not "
                "known here, and guessing would mix them. Call the whole model; checkpoint activations with "
                "`model.gradient_checkpointing_enable()`; or remove the hooks for batches that are not packed."
            )
        inside = frame.module is module and frame.regrouped
        return None if inside else frame.layout

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, layout: RowLayout
    ) -> Arguments:
        moved = {
            name: self._move(value, call, layout, name)
            for name, value in kwargs.items()
            if name not in BOUNDARY_KEYS
        }
        return tuple(self._move(value, call, layout, "") for value in args), moved

    def _bare(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: RowLayout) -> Arguments:
        """Leave out boundaries and 4-D masks, which a recurrent layer cannot use."""
        kept = {
            name: None if _is_row_mask(value, layout) else value
            for name, value in kwargs.items()
            if name not in BOUNDARY_KEYS
        }
        return tuple(None if _is_row_mask(value, layout) else value for value in args), kept

    def _move(self, value: Any, call: Call, layout: RowLayout, name: str) -> Any:
        if _is_row_mask(value, layout):
            return cut_mask(value, call, layout) if self.masks == "cut" else None
        if "mask" in name:
            return None
        return take(value, call, layout)

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        frame = top()
        if frame is None or frame.module is not module or frame.scope is not self.scope:
            return None
        if not isinstance(frame.stash, _Running):
            return None
        pop()
        if output is None:  # the forward raised
            return None
        args, kwargs, plan = frame.stash
        outputs = [output]
        for call in plan.calls[1:]:
            push(Frame(self.scope, module, call.layout, regrouped=True))
            try:
                call_args, call_kwargs = self._arguments(args, kwargs, call, plan.layout)
                outputs.append(module(*call_args, **call_kwargs))
            finally:
                pop()
        return put(outputs, plan)


class PerDocumentHooks:
    """Modules of one model that run once per document; `remove()` them, or use as a context manager.

    Removing waits for nobody: do it after the backward, because recomputed activations need the hooks too.

    Attributes:
        modules: the modules that carry hooks.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], groups: Groups) -> None:
        self.modules = tuple(modules)
        self._entry = ModelEntry(model)
        hooks = PerDocument(self._entry, groups=groups)
        self._handles = [handle for module in self.modules for handle in hooks.attach(module)]
        self._entry.attach()

    def remove(self) -> None:
        """Take all hooks off; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entry.remove()

    def __enter__(self) -> "PerDocumentHooks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def run_per_document(
    model: nn.Module, modules: Iterable[nn.Module], *, groups: Groups = near_lengths
) -> PerDocumentHooks:
    """Run recurrent modules of a model once per document of a packed row.

    `isolate` finds the modules by measurement; this is for those who know them.

    Args:
        model: the model; its calls say where documents begin.
        modules: causal modules that take and return `[B, S, ...]`.
        groups: which documents share a call.

    Returns:
        The hooks; keep them until the last backward is done.
    """
    return PerDocumentHooks(model, modules, groups)


def _is_row_mask(value: Any, layout: RowLayout) -> bool:
    square = (layout.row_length, layout.row_length)
    return isinstance(value, LazyMask) or (
        isinstance(value, Tensor) and value.ndim == 4 and tuple(value.shape[-2:]) == square
    )


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device


def _rows_and_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value.shape[0], value.shape[1]
    return None


__all__ = ["PerDocument", "PerDocumentHooks", "Regrouping", "run_per_document"]
