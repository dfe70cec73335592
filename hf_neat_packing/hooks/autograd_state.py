"""What autograd says about the thread that asks: which backward runs, which saved-tensor hooks are in force.

torch has no public getters for either; `torch.utils.checkpoint` reads the same two.
"""

from collections.abc import Callable
from typing import Any

import torch

PackHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def current_backward() -> int:
    """Return a number for the backward pass that this thread is executing, -1 outside of one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def saved_tensors_hooks_in_force() -> PackHooks | None:
    """Return the innermost `saved_tensors_hooks` of this thread as `(pack, unpack)`, or None."""
    hooks: PackHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    return hooks
