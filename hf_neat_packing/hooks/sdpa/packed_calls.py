"""The attention calls of packed forwards: found, confined to their documents, or refused.

Attention is found by a `TorchFunctionMode`, which belongs to one thread and sees
`scaled_dot_product_attention` under whatever name it was imported. No function is replaced. The mode is in force
while a packed model runs, and while a hooked attention module runs again for a backward.
"""

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import current_backward, saved_tensors_hooks_in_force
from ...errors import UnsupportedAttentionError, UnsupportedModelError
from .multihead import attended_shape, packed_multi_head_attention
from .packed_attention import Armed, packed_attention
from .packed_forward import current_forward, recompute, waiting


@dataclass(eq=False)
class Call:
    """One call of an attention module that carries a hook."""

    module: nn.Module
    armed: Armed | None = None
    hits: int = 0
    mode: TorchFunctionMode | None = None
    state: tuple[bool, Any] = (False, None)


class _Thread(threading.local):
    """The attention modules that one thread is inside of, and whether a kernel of ours runs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.computing = False


_thread = _Thread()


def _current_armed(module: nn.Module) -> Armed | None:
    """Say whose attention call this is: a running forward's, a recompute's, or nobody's (None)."""
    forward = current_forward()
    if forward is not None:
        return forward.armed
    if current_backward() == -1:
        return waiting()
    if (armed := recompute()) is not None:
        return armed
    raise UnsupportedModelError(
        f"{type(module).__name__} runs again during a backward pass, and the boundaries of its forward did not come "
        "with the saved tensors; without them documents would mix in the gradients. Accepted: forwards that call "
        "the model itself (not a layer, and not `.forward`) after the hooks were attached, and no "
        "`saved_tensors_hooks` of your own around a checkpoint inside the model."
    )


def open_call(module: nn.Module) -> None:
    """Start a call of an attention module on this thread; `close_call` must follow."""
    call = Call(module)
    _thread.calls.append(call)
    call.armed = _current_armed(module)
    if call.armed is None or call.armed.rows is None:
        return
    call.state = _autograd_state()
    forward = current_forward()
    if forward is None or (forward.inherited or forward).mode is None:
        call.mode = PackedAttentionMode()
        call.mode.__enter__()  # type: ignore[no-untyped-call]


def close_call(module: nn.Module, *, finished: bool) -> None:
    """End the call of an attention module; a finished packed one must have reached SDPA."""
    if not _thread.calls or _thread.calls[-1].module is not module:
        return
    call = _thread.calls.pop()
    if call.mode is not None:
        call.mode.__exit__(None, None, None)
    if finished and call.armed is not None and call.armed.rows is not None and not call.hits:
        raise UnsupportedModelError(
            f"{type(module).__name__} ran over packed rows without one call of scaled_dot_product_attention that "
            "could be confined to its documents: it computes attention another way (an eager softmax, a fused kernel, "
            'a replaced function). Load the model with attn_implementation="sdpa", or leave the module out '
            "with `modules=[...]` if it is no attention."
        )


def _autograd_state() -> tuple[bool, Any]:
    hooks = saved_tensors_hooks_in_force()
    return torch.is_grad_enabled(), None if hooks is None else hooks[0]


class PackedAttentionMode(TorchFunctionMode):
    """Confines the attention calls of packed forwards to their documents; everything else runs as it is."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at one torch function call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "attention" not in name or _thread.computing:
            return func(*args, **kwargs)
        call = _thread.calls[-1] if _thread.calls else None
        if call is None:
            _refuse_unhooked(name, args, kwargs)
            return func(*args, **kwargs)
        if call.armed is None or call.armed.rows is None:
            return func(*args, **kwargs)
        if call.state != _autograd_state():
            raise UnsupportedModelError(
                f"{type(call.module).__name__} starts a checkpoint, `no_grad` or `saved_tensors_hooks` around its "
                "attention. A recompute would run past the hooks of the module, with documents mixed. Attach to "
                "the module that is called inside of it (`modules=[...]`), or checkpoint the whole module."
            )
        if name not in _HANDLED:
            raise UnsupportedAttentionError(
                f"{type(call.module).__name__} calls {name} over packed rows, which cannot be confined to documents. "
                "Accepted: scaled_dot_product_attention and torch.nn.MultiheadAttention."
            )
        for outer in _thread.calls:
            outer.hits += 1
        forward = current_forward()
        if forward is not None:
            forward.hits += 1
        with _Computing():
            return _HANDLED[name](call.armed, func, args, kwargs)


class _Stamp(torch.autograd.Function):
    """Saves an empty tensor whose shape is the number of the forward.

    A checkpoint compares the shapes that its recompute saves with those of the forward; a recompute with
    the boundaries of another forward is an error there, even if its document lengths are alike.
    """

    @staticmethod
    def forward(ctx, output, number):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output.new_empty(0, number))
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


# Document lengths differ in every batch: a compiled graph would be made anew for each.
@torch.compiler.disable
def _sdpa(armed: Armed, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _stamped(packed_attention(armed, *args, **kwargs), armed)


@torch.compiler.disable
def _multihead(
    armed: Armed, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    output, weights = packed_multi_head_attention(armed, func, args, kwargs)
    return _stamped(output, armed), weights


def _stamped(output: Tensor, armed: Armed) -> Tensor:
    if not output.requires_grad:
        return output
    stamped: Tensor = _Stamp.apply(output, armed.number)  # type: ignore[no-untyped-call]
    return stamped


_HANDLED = {
    "scaled_dot_product_attention": _sdpa,
    "multi_head_attention_forward": _multihead,
}


def _refuse_unhooked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse attention over packed rows in a module that carries no hook: its recompute could not be confined."""
    forward = current_forward()
    if forward is None or forward.armed.rows is None or name not in _HANDLED:
        return
    rows, (shape, one_way) = forward.armed.rows, attended_shape(name, args, kwargs)
    if shape != rows.shape or rows.shape[1] == 1 or not (one_way or forward.armed.bidirectional):
        return
    raise UnsupportedModelError(
        f"{type(forward.root).__name__} calls {name} over its packed rows {list(rows.shape)} in a module that carries "
        "no hook, so documents would mix there. Name the module in `modules=[...]`, beside the others."
    )


class _Computing:
    """Marks that the calls of this thread are the kernel's own."""

    def __enter__(self) -> None:
        _thread.computing = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.computing = False
