"""How the boundaries of a packed forward reach its attention calls, also when they are computed again.

While a model runs, its boundaries lie on a stack of the running thread. For activation recompute they ride
with the tensors that autograd saves: at the entry of the model `saved_tensors_hooks` are put in force, so
the inputs that a checkpoint keeps for its recompute are packed together with the boundaries of the
forward that made them. Unpacking them, which every checkpoint does just before it runs its function
again, tells the unpacking thread whose recompute this is. So several forwards may be in flight, a
backward may run on another thread, and nothing has to be switched off at the end of a step.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..._compat import PackHooks, current_backward, saved_tensors_hooks_in_force, tree_map
from .packed_attention import Armed

# A garbage collection inside the lock may run a finalizer that asks again.
_lock = threading.RLock()
_alive: "weakref.WeakSet[Armed]" = weakref.WeakSet()


class _Thread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        # Boundaries for the next forward of a model, given by hand.
        self.waiting: Armed | None = None
        # The backward pass, and the forward whose saved tensors it has unpacked last.
        self.recompute: tuple[int, weakref.ref[Armed]] | None = None


_thread = _Thread()


@dataclass(eq=False)
class Forward:
    """One call of a model that carries an entry hook."""

    root: nn.Module
    backward: int
    armed: Armed = Armed(None)  # noqa: RUF009
    hits: int = 0
    mode: TorchFunctionMode | None = None
    saved: saved_tensors_hooks | None = None
    inherited: "Forward | None" = None

    def give(self, armed: Armed) -> None:
        """Change the boundaries for the attention that is still to come."""
        self.armed = remember(armed)
        if self.inherited is not None:
            self.inherited.give(armed)


def open_forward(root: nn.Module) -> Forward:
    """Start a forward of `root` on this thread; `close_forward` must follow."""
    forward = Forward(root, current_backward())
    _thread.forwards.append(forward)
    return forward


def arm_forward(forward: Forward, armed: Armed, mode: TorchFunctionMode) -> None:
    """Give an opened forward its boundaries and put its hooks in force.

    Args:
        forward: the innermost forward of this thread.
        armed: its boundaries.
        mode: what watches its attention calls where it has boundaries.
    """
    forward.armed = remember(armed)
    if torch.is_grad_enabled():
        forward.saved = _saved_with(forward, saved_tensors_hooks_in_force())
        forward.saved.__enter__()
    if armed.rows is not None:
        forward.mode = mode
        forward.mode.__enter__()


def close_forward(root: nn.Module) -> Forward | None:
    """End the forward of `root` and put back what was in force before it."""
    if not _thread.forwards or _thread.forwards[-1].root is not root:
        return None
    forward = _thread.forwards.pop()
    if forward.inherited is not None:
        forward.inherited.hits += forward.hits
        return None
    if forward.mode is not None:
        forward.mode.__exit__(None, None, None)
    if forward.saved is not None:
        forward.saved.__exit__(None, None, None)
    # The hooks refer to the forward: without this the two would keep each other, and the graph, alive.
    forward.mode = forward.saved = None
    return forward


def current_forward() -> Forward | None:
    """Return the innermost forward that runs on this thread, unless a backward has begun inside it."""
    forward = _thread.forwards[-1] if _thread.forwards else None
    return forward if forward is not None and forward.backward == current_backward() else None


def inherit_forward(forward: Forward) -> bool:
    """Let an opened forward share the boundaries of the one around it, if it is a part of that model."""
    outer = _thread.forwards[-2] if len(_thread.forwards) > 1 else None
    if outer is None or outer.backward != forward.backward:
        return False
    if not any(module is forward.root for module in outer.root.modules()):
        return False
    forward.inherited, forward.armed = outer, outer.armed
    return True


def remember(armed: Armed) -> Armed:
    """Note that a forward exists, so that hooks outlive it for its recompute."""
    with _lock:
        _alive.add(armed)
    return armed


def alive(owner: int) -> list[Armed]:
    """List the packed forwards of an attachment whose graphs still exist."""
    with _lock:
        return [armed for armed in _alive if armed.owner == owner and armed.rows is not None]


def wait_with(armed: Armed | None) -> None:
    """Set the boundaries for forwards of this thread that bring none."""
    _thread.waiting = None if armed is None else remember(armed)


def waiting() -> Armed | None:
    """Return the boundaries for forwards of this thread that bring none."""
    return _thread.waiting


def _saved_with(forward: Forward, outer: PackHooks | None) -> saved_tensors_hooks:
    """Make hooks that pack the boundaries of `forward` beside each saved tensor, over those in force."""
    outer_pack, outer_unpack = outer if outer is not None else (None, None)

    @torch.compiler.disable
    def pack(tensor: Tensor) -> tuple[Armed, Any]:
        # Without `detach` an output that its own node saves would keep the graph alive in a cycle.
        return forward.armed, tensor.detach() if outer_pack is None else outer_pack(tensor)

    @torch.compiler.disable
    def unpack(packed: tuple[Armed, Any]) -> Tensor:
        armed, saved = packed
        _remember_recompute(weakref.ref(armed))
        if outer_unpack is not None:
            # May compute a whole region again, and unpack other tensors on the way.
            saved = outer_unpack(saved)
            _remember_recompute(weakref.ref(armed))
        tensor: Tensor = saved
        return tensor

    return saved_tensors_hooks(pack, unpack)


def mark_output(forward: Forward, output: Any) -> None:
    """Let a backward that enters through an output know whose it is, before it computes anything again.

    A checkpoint that takes no tensors packs none; right behind the output of a model it would find no mark.
    """
    armed = weakref.ref(forward.armed)

    def mark(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(lambda _: _remember_recompute(armed))
        return tensor

    tree_map(mark, output)


def _remember_recompute(armed: "weakref.ref[Armed]") -> None:
    _thread.recompute = (current_backward(), armed)


def recompute() -> Armed | None:
    """Return the boundaries of the forward that the backward of this thread is computing again, if known."""
    if _thread.recompute is None or _thread.recompute[0] != current_backward():
        return None
    return _thread.recompute[1]()
