"""What torch does not offer publicly: its varlen operator over releases, graphs, hooks in force, autograd."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = [
    "PackHooks",
    "assert_on_device",
    "autograd_inside_operator",
    "current_backward",
    "forward_hooks",
    "is_tracing",
    "plain_torch_function",
    "saved_tensors_hooks_in_force",
    "torch_varlen_attention",
    "torch_varlen_groups_heads",
    "tree_map",
    "wrapper_tensor",
]


def is_tracing() -> bool:
    """Whether torch records a graph, so that no value may be read and no object may be made."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Check a condition without reading it to the host; a false one aborts the device's work."""
    torch._assert_async(condition, message)


def wrapper_tensor(cls: type[torch.Tensor], shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Make a bool tensor that has a shape and no storage; every operation on it dispatches to its class."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)


# Operations on a wrapper tensor go to `__torch_dispatch__`, and results are not turned into the subclass.
plain_torch_function = torch._C._disabled_torch_function_impl


def _find_varlen() -> tuple[Callable[..., Any] | None, frozenset[str]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # drop at torch >= 2.10
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


# Found once, outside of any graph.
_VARLEN, _VARLEN_PARAMETERS = _find_varlen()


def torch_varlen_attention() -> Callable[..., Any] | None:
    """Return torch's own varlen attention, or None where this torch has none with a scale and a window.

    torch 2.10 had a causal flag instead (drop at torch >= 2.11).
    """
    return _VARLEN if {"scale", "window_size"} <= _VARLEN_PARAMETERS else None


def torch_varlen_groups_heads() -> bool:
    """Whether it takes fewer key heads than query heads (drop at torch >= 2.12)."""
    return "enable_gqa" in _VARLEN_PARAMETERS


@contextlib.contextmanager
def autograd_inside_operator() -> Iterator[None]:
    """Differentiate inside the kernel of a custom operator, where torch has switched autograd off.

    An operator is called below autograd; there is no public way back (drop when there is).
    """
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """List what runs before and after a module's forward, global hooks too; torch has no public getter."""
    shared = torch.nn.modules.module
    tables = (
        module._forward_pre_hooks,
        module._forward_hooks,
        shared._global_forward_pre_hooks,
        shared._global_forward_hooks,
    )
    return [hook for table in tables for hook in table.values()]


PackHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def current_backward() -> int:
    """Return a number for the backward pass that this thread is executing, -1 outside of one.

    torch has no public getter; `torch.utils.checkpoint` reads the same one (drop when there is).
    """
    return torch._C._current_graph_task_id()


def saved_tensors_hooks_in_force() -> PackHooks | None:
    """Return the innermost `saved_tensors_hooks` of this thread as `(pack, unpack)`, or None (as above)."""
    hooks: PackHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks
