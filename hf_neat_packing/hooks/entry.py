"""The entry of a model whose parts are kept apart by hooks: where the documents of a forward become known.

Legend: `B` rows, `S` tokens in a row, `N` documents, `W` tokens of the longest.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ContractError
from ..wrappers import entry_module, forward_parameters, takes_any_keyword, unwrap
from .regroup import Call, Regrouping, equal_lengths, put, regroup, take
from .running import (
    BOUNDARY_KEYS,
    Frame,
    RowLayout,
    Scope,
    carry_through_checkpoints,
    pop,
    push,
    read_layout,
    restore_checkpoints,
    top,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_TOKENS = ("input_ids", "inputs_embeds", "hidden_states")
_IGNORED_LABEL = -100


def all_together(lengths: tuple[int, ...]) -> Sequence[Sequence[int]]:
    """Group all documents into one call."""
    return [range(len(lengths))]


class _Entered(NamedTuple):
    """What the hook at the entry keeps until the model is left; no plan where the rows stay as they are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Regrouping | None = None


class ModelEntry(Scope):
    """Hooks at the entry of a model; the scope of its forwards.

    For a packed batch they say where the documents are (`running`), keep a cache from being built, take away the
    keys that the forward does not know, and let checkpointed layers find the boundaries when they are
    run again. A batch that is not packed passes unchanged.

    Attributes:
        root: the module that is called by its own name.
        unpack: run the model on one document per row and scatter what it returns: `plain`
            padded, for causal models, `masked` with a 2-D padding mask, `each` in one call per distinct
            document length without padding, or None.
        strip: further keyword arguments that are taken away from packed batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root = entry_module(model)
        self.unpack: Literal["plain", "masked", "each"] | None = None
        self.strip: set[str] = set()
        self._parameters = forward_parameters(unwrap(model)) or {}
        config = getattr(unwrap(model), "config", None)
        text = getattr(config, "get_text_config", lambda: config)()
        self._has_cache_switch = hasattr(config, "use_cache") or hasattr(text, "use_cache")
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks on: at the root, and at every part inside that can be called with tokens by itself."""
        self.attached = True
        for module in self.root.modules():
            parameters = forward_parameters(module) or {}
            if module is self.root or "input_ids" in parameters or "inputs_embeds" in parameters:
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
                ]

    def remove(self) -> None:
        """Take the hooks off and put the checkpoint functions back; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.attached = False
        restore_checkpoints(self.root)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        above = top()
        # A part may be handed packed rows by a hook of others though the model itself was not.
        if above is not None and above.scope is self and above.layout is not None:
            return None
        layout = read_layout(kwargs, _shape(args, kwargs))
        if layout is None:
            push(Frame(self, module, None, _Entered(args, kwargs)))
            return None
        _refuse_cache(module, kwargs)
        if module.training and torch.is_grad_enabled():
            carry_through_checkpoints(self.root)
        kwargs = self._prepare(module, kwargs)
        if self.unpack is None or module is not self.root or layout.one_document_a_row:
            push(Frame(self, module, layout, _Entered(args, kwargs)))
            return args, kwargs
        groups = equal_lengths if self.unpack == "each" else all_together
        plan = regroup(layout, groups, _device(args, kwargs))
        push(Frame(self, module, plan.calls[0].layout, _Entered(args, kwargs, plan), True))
        return self._unpacked(args, kwargs, plan.calls[0], layout)

    def _prepare(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        parameters = (self._parameters if module is self.root else forward_parameters(module)) or {}
        everything = takes_any_keyword(parameters)
        optional = (*BOUNDARY_KEYS, "position_ids", "attention_mask")
        kept = {
            name: value
            for name, value in kwargs.items()
            if name not in self.strip and (everything or name in parameters or name not in optional)
        }
        if "use_cache" in parameters or (everything and self._has_cache_switch):
            kept["use_cache"] = False
        return kept

    def _unpacked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, layout: RowLayout
    ) -> Arguments:
        """Lay the arguments of the model out as one document per row."""
        moved = {
            name: take(value, call, layout)
            for name, value in kwargs.items()
            if name not in BOUNDARY_KEYS and name != "attention_mask"
        }
        padding = _padding(call, _device(args, kwargs))
        if layout.real is not None:
            call.layout.real = take(layout.real, call, layout) & ~padding
        for name, value in moved.items():
            if not isinstance(value, Tensor) or tuple(value.shape[:2]) != tuple(padding.shape):
                continue
            if "label" in name:
                moved[name] = value.masked_fill(padding, _IGNORED_LABEL)
            elif name == "position_ids":
                moved[name] = value + padding.cumsum(1)
        if self.unpack == "masked":
            moved["attention_mask"] = (~padding).long()
        if self.unpack == "each":
            moved.pop("position_ids", None)  # a document alone is numbered by the model itself
        return tuple(take(value, call, layout) for value in args), moved

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        frame = top()
        if frame is None or frame.scope is not self or frame.module is not module:
            return None
        if not isinstance(frame.stash, _Entered):
            return None
        pop()
        if output is None or frame.stash.plan is None:
            return None
        return self._scattered(module, output, frame.stash)

    def _scattered(self, module: nn.Module, output: Any, entered: "_Entered") -> Any:
        """Run the calls that are left, and lay all outputs out in the rows."""
        plan = entered.plan
        assert plan is not None
        outputs = [output]
        for call in plan.calls[1:]:
            push(Frame(self, module, call.layout, regrouped=True))
            try:
                args, kwargs = self._unpacked(entered.args, entered.kwargs, call, plan.layout)
                outputs.append(module(*args, **kwargs))
            finally:
                pop()
        laid = put(outputs, plan)
        if len(outputs) > 1:
            _set_loss(laid, _joined_loss(outputs, entered, plan))
        return laid


def _refuse_cache(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "cache"):
        cache = kwargs.get(name)
        length = getattr(cache, "get_seq_length", lambda: 0)()
        if cache is not None and length:
            raise ContractError(
                f"{type(module).__name__} got a packed row beside a cache of {int(length)} tokens (`{name}`): all "
                "documents would continue the same past. Send packed rows without a cache."
            )


def _padding(call: Call, device: torch.device) -> Tensor:
    """Say which slots of a call hold no token: bool `[N, W]`."""
    lengths = torch.tensor(call.layout.lengths, device=device)
    return torch.arange(call.width, device=device)[None] >= lengths[:, None]


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    for value in [*(kwargs.get(name) for name in _TOKENS), *args[:1]]:
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[0], value.shape[1]
    return None


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device


def _joined_loss(outputs: Sequence[Any], entered: _Entered, plan: Regrouping) -> Tensor | None:
    """Combine the losses of all calls: a sum where the caller divides by a count, else a mean over labels."""
    losses = [getattr(output, "loss", None) for output in outputs]
    labels = entered.kwargs.get("labels")
    if labels is None or any(loss is None for loss in losses):
        return None
    if entered.kwargs.get("num_items_in_batch") is not None:
        return torch.stack(losses).sum()  # type: ignore[arg-type]
    counted = [
        (labels.reshape(-1)[call.source] != _IGNORED_LABEL).sum().to(labels.device)
        for call in plan.calls
    ]
    # A group without a label has a loss of 0 / 0, which must not reach the others.
    parts = [loss * count for loss, count in zip(losses, counted, strict=True) if int(count) > 0]
    return torch.stack(parts).sum() / sum(counted) if parts else losses[0]


def _set_loss(output: Any, loss: Tensor | None) -> None:
    if loss is not None:
        output["loss"] = loss
