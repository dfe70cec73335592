"""The hooks of one model for packed SDPA: put on once, taken off together, never before their recomputes are done."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import ContractError
from .packed_calls import close_call, open_call
from .packed_forward import alive

_REGISTRY = "_neat_packing_sdpa_hooks"
_CALL_HOOKS = "_neat_packing_attention_hooks"
_numbers = itertools.count()


@dataclass(frozen=True)
class Settings:
    """What an attachment was made with.

    Attributes:
        backend: a name of `BACKENDS`, or None for the one that is configured when a forward begins.
        bidirectional: whether unmasked calls that look both ways are this model's attention.
        reads_batch: whether boundaries are read from the inputs of the model.
        names: qualified names of the hooked modules.
    """

    backend: str | None
    bidirectional: bool
    reads_batch: bool
    names: tuple[str, ...]


@dataclass(eq=False)
class Attachment:
    """The hooks on one model and the handles that hold them there."""

    root: nn.Module
    settings: Settings
    number: int = field(default_factory=lambda: next(_numbers))
    handles: "list[SdpaHooksHandle]" = field(default_factory=list)
    entry: list[RemovableHandle] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def release(self, handle: "SdpaHooksHandle") -> None:
        """Let one handle go; the last one takes the hooks off."""
        if handle not in self.handles:
            return
        self.handles.remove(handle)
        if self.handles:
            return
        for hook in self.entry:
            hook.remove()
        if vars(self.root).get(_REGISTRY) is self:
            del self.root.__dict__[_REGISTRY]
        self._remove_when_idle()

    def _remove_when_idle(self) -> None:
        """Hooks on attention modules stay while a graph lives whose recompute needs them; they touch nothing else."""
        waiting = alive(self.number)
        if not waiting:
            for module in self.modules:
                _release(module)
            self.modules = []
            return
        weakref.finalize(waiting[0], self._remove_when_idle).atexit = False


class SdpaHooksHandle:
    """Hooks for packed SDPA on a model; `remove()` them, or use the handle as a context manager.

    The hooks stay until every handle of the model is removed. A backward that computes activations again after
    the removal still gets the boundaries of its forward.

    Attributes:
        module: the model that carries the hooks.
        hooked: qualified names of its attention modules.
    """

    def __init__(self, held: Attachment) -> None:
        self.module = held.root
        self.hooked = held.settings.names
        self._attachment = held
        held.handles.append(self)

    def remove(self) -> None:
        """Give the hooks up; a second call does nothing."""
        self._attachment.release(self)

    def __enter__(self) -> "SdpaHooksHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def attachment(module: nn.Module) -> Attachment | None:
    """Return the hooks that a model carries, or None."""
    return vars(module).get(_REGISTRY)


def attach(
    root: nn.Module,
    modules: dict[str, nn.Module],
    settings: Settings,
    *,
    enter: Callable[..., Any],
    leave: Callable[..., Any],
) -> SdpaHooksHandle:
    """Put hooks on a model, or hand out one more handle for equal ones that are there.

    Args:
        root: the module that is called as the model.
        modules: its attention modules by name.
        settings: what the hooks do.
        enter: pre-hook of the model, called with the attachment number and the settings first.
        leave: hook after its forward, called in every case.

    Raises:
        ContractError: the model carries hooks that do something else.
    """
    present = attachment(root)
    if present is not None:
        if present.settings != settings:
            raise ContractError(
                f"{type(root).__name__} already carries packed SDPA hooks made with {present.settings}, now asked for "
                f"with {settings}. Two sets would disagree about its documents. Remove the first handle, or call "
                "detach_cp1_packed_varlen_hooks(model)."
            )
        return SdpaHooksHandle(present)
    made = Attachment(root, settings)
    made.entry = [
        root.register_forward_pre_hook(partial(enter, made.number, settings), with_kwargs=True),
        root.register_forward_hook(leave, always_call=True),
    ]
    for module in modules.values():
        _hold(module)
        made.modules.append(module)
    root.__dict__[_REGISTRY] = made
    return SdpaHooksHandle(made)


@dataclass(eq=False)
class _CallHooks:
    """The hooks on one attention module, shared by all models that it is a part of."""

    handles: tuple[RemovableHandle, RemovableHandle]
    users: int = 1


def _hold(module: nn.Module) -> None:
    present: _CallHooks | None = vars(module).get(_CALL_HOOKS)
    if present is not None:
        present.users += 1
        return
    module.__dict__[_CALL_HOOKS] = _CallHooks(
        (
            module.register_forward_pre_hook(_before_attention),
            module.register_forward_hook(_after_attention, always_call=True),
        )
    )


def _release(module: nn.Module) -> None:
    present: _CallHooks = vars(module)[_CALL_HOOKS]
    present.users -= 1
    if present.users == 0:
        for hook in present.handles:
            hook.remove()
        del module.__dict__[_CALL_HOOKS]


def _before_attention(module: nn.Module, args: Any) -> None:
    open_call(module)


def _after_attention(module: nn.Module, args: Any, output: Any) -> None:
    close_call(module, finished=output is not None)
