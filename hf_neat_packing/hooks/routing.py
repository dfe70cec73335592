"""Padding left out of what a router counts: its balance loss, and the load of its experts.

Transformers takes the balance loss over the router logits of all tokens that a 2-D `attention_mask` calls real. A
packed batch brings no such mask: under varlen kwargs the padding tail would count, and a 4-D mask makes the loss
raise. So the part of the model that returns router logits returns those of real tokens only, and masks go to that
part and not to the loss.

Legend: `B` rows, `S` tokens in a row, `T` real tokens, `E` experts.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..contract import DOCUMENT_MAP_KEY
from ..errors import UnsupportedModelError
from ..wrappers import forward_parameters, unwrap
from .running import Scope, running

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_REGISTRY = "_neat_packing_routing"
_SWITCH = "output_router_logits"
_DECLARATIONS = (_SWITCH, "router_aux_loss_coef", "aux_loss_coef")


class _Entered(NamedTuple):
    """What a running forward of a model with a router was called with."""

    hooks: "RoutingHooks"
    document_map: Tensor | None
    mask: Any
    by_part: bool = False


_ENTERED: ContextVar[tuple[_Entered, ...]] = ContextVar("routed_forward", default=())


class RoutingHooks:
    """Hooks that leave padding out of the router's counts; `remove()` them, or use as a context manager.

    Attributes:
        model: the unwrapped model, whose loss is meant.
        part: the module inside that returns router logits; the model itself where it has no such part.
        scope: whose forwards say how tokens were regrouped, or None.
        counters: how many others ask which tokens are real; without them, and without a balance loss, a forward
            passes untouched, so that it compiles as it is.
    """

    def __init__(self, model: nn.Module, scope: Scope | None = None) -> None:
        self.model, self.scope = unwrap(model), scope
        part = getattr(self.model, "base_model", self.model)
        self.part: nn.Module = part if isinstance(part, nn.Module) else self.model
        self.counters = 0
        # Before the first forward that asks, nothing is looked up, and a graph need not break for it.
        self._used = False
        self._handles: list[RemovableHandle] = []
        self.model.__dict__[_REGISTRY] = self
        self.attach()

    def attach(self) -> None:
        """Put the hooks on, behind those that are there: what changes a batch comes before what reads it."""
        self._detach()
        self._handles = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.part.register_forward_pre_hook(self._enter_part, with_kwargs=True),
            self.part.register_forward_hook(self._leave_part, always_call=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        self._detach()
        if vars(self.model).get(_REGISTRY) is self:
            del self.model.__dict__[_REGISTRY]

    def __enter__(self) -> "RoutingHooks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def is_running(self) -> bool:
        """Whether a forward of the model is running; a recomputation in its backward is none."""
        return self._entered() is not None

    def real_tokens(self) -> Tensor | None:
        """Say which slots of the running forward hold real tokens: bool `[B, S]`, or None where all may."""
        entered, real = self._entered(), self._regrouped()
        if real is None and entered is not None and entered.document_map is not None:
            real = entered.document_map != 0
        return real

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        asked = asks_for_router_logits(module, kwargs)
        if not asked and not self.counters:
            return None
        document_map, mask = kwargs.get(DOCUMENT_MAP_KEY), kwargs.get("attention_mask")
        packed = document_map is not None or self._regrouped() is not None
        kept = mask if packed and asked and self.part is not self.model else None
        self._push(_Entered(self, document_map, kept))
        if kept is None:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}

    def _enter_part(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        entered = self._entered()
        if entered is None and not (self.counters or asks_for_router_logits(self.model, kwargs)):
            return None
        if entered is None:
            # Somebody ran the model by `.forward`, past its hooks, as older adapters do.
            document_map = kwargs.get(DOCUMENT_MAP_KEY)
            self._push(_Entered(self, document_map, None, by_part=True))
            return None
        return None if entered.mask is None else (args, kwargs | {"attention_mask": entered.mask})

    def _leave_part(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._used:
            return
        entered, real = self._entered(), self.real_tokens()
        if entered is not None and entered.by_part:
            _ENTERED.set(_ENTERED.get()[:-1])
        logits = getattr(output, "router_logits", None)
        if not isinstance(logits, (tuple, list)) or real is None or bool(real.all()):
            return
        name = type(self.model).__name__
        output["router_logits"] = tuple(_of_real_tokens(each, real, name) for each in logits)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.is_running():
            _ENTERED.set(_ENTERED.get()[:-1])

    def _push(self, entered: _Entered) -> None:
        self._used = True
        _ENTERED.set((*_ENTERED.get(), entered))

    def _entered(self) -> _Entered | None:
        if not self._used:
            return None
        entered = _ENTERED.get()
        return entered[-1] if entered and entered[-1].hooks is self else None

    def _regrouped(self) -> Tensor | None:
        """Say which slots hold real tokens, where the tokens of the batch lie otherwise inside."""
        frame = None if self.scope is None else running(self.scope)
        return frame.layout.real if frame is not None and frame.layout is not None else None


def leave_padding_out_of_routing(
    model: nn.Module, *, scope: Scope | None = None
) -> RoutingHooks | None:
    """Let the balance loss and the router logits of a model hold real tokens only.

    `isolate` and `configure_packing` call it. The router logits that the model returns are then `[T, E]`: expert
    loads that are counted from them leave padding out too.

    Args:
        model: the model, in any number of wrappers.
        scope: whose forwards say how tokens are regrouped.

    Returns:
        The hooks; those of an earlier call are kept. None where the model has no router that is known to count.
    """
    inner = unwrap(model)
    known = routing_hooks(inner)
    if known is not None:
        if scope is not None:
            known.scope = scope
            known.attach()
        return known
    return RoutingHooks(inner, scope) if has_router(inner) else None


def routing_hooks(model: nn.Module) -> RoutingHooks | None:
    """Return the hooks that leave padding out of a model's routing, or None."""
    hooks: RoutingHooks | None = vars(unwrap(model)).get(_REGISTRY)
    return hooks


def has_router(model: Any) -> bool:
    """Whether a model, or its config, names a router's logits or its balance loss."""
    parts = _configs(model)
    named = any(hasattr(part, name) for part in parts for name in _DECLARATIONS)
    return named or _SWITCH in (forward_parameters(model) or {})


def asks_for_router_logits(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a forward takes the balance loss: by its arguments, else by its config."""
    given = kwargs.get(_SWITCH)
    if given is not None:
        return bool(given)
    return any(bool(getattr(part, _SWITCH, False)) for part in _configs(model))


def _configs(model: Any) -> list[Any]:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return [part for part in (config, text) if part is not None]


def _of_real_tokens(logits: Tensor, real: Tensor, model: str) -> Tensor:
    """Keep the router logits of real tokens: `[B * S, E]` or `[B, S, E]` become `[T, E]`."""
    if logits.shape[:2] == real.shape and logits.ndim > 2:
        logits = logits.flatten(0, 1)
    if logits.shape[0] != real.numel():
        raise UnsupportedModelError(
            f"{model} returned router logits of shape {list(logits.shape)} for {list(real.shape)} tokens, so padding "
            "cannot be left out of its balance loss. Accepted: one row of logits per token; or rows without padding "
            "(no `row_length`, no `pad_to_multiple_of`, one row a batch)."
        )
    return logits[torch.flatten(real).to(logits.device)]
