"""The kernels that compute a `VarlenCall`, and the one choice among them.

`auto` takes the first kernel of `PREFERENCE` that can compute the whole call and says why the
ones before it could not; a kernel asked for by name is never replaced by another.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...errors import UnsupportedAttentionError
from . import explicit, flash, reference, sdpa, torch_varlen
from .call import DocumentMask, VarlenCall

__all__ = ["KERNELS", "DocumentMask", "KernelChoice", "VarlenCall", "choose_kernel", "run"]


def _sdpa_why_not(call: VarlenCall) -> str | None:
    if call.softcap is not None:
        return "scaled_dot_product_attention has no softcap"
    return "scaled_dot_product_attention has no sinks (s_aux)" if call.sinks is not None else None


def _never_refuses(call: VarlenCall) -> None:
    return None


KERNELS: dict[str, tuple[Callable[[VarlenCall], Tensor], Callable[[VarlenCall], str | None]]] = {
    # Not "flash": transformers takes every key with that word for one of its own kernels.
    "fa": (flash.attention, flash.why_not),
    "torch_varlen": (torch_varlen.attention, torch_varlen.why_not),
    "sdpa": (sdpa.attention, _sdpa_why_not),
    "explicit": (explicit.attention, _never_refuses),
    "reference": (lambda call: reference.attention(call).to(call.value.dtype), _never_refuses),
}
"""Name -> (function, what it cannot compute); `fa` is the package flash-attn, `reference` is for tests."""

PREFERENCE = ("fa", "torch_varlen", "sdpa", "explicit")


class KernelChoice(NamedTuple):
    """Which kernel computes a call, and why: one line for every kernel looked at."""

    name: str
    trace: tuple[str, ...]


def choose_kernel(call: VarlenCall, requested: str = "auto") -> KernelChoice:
    """Choose the kernel of a call.

    Args:
        call: what is to be computed; only devices, dtypes, shapes and options are looked at.
        requested: a name of `KERNELS`, or `auto`.

    Raises:
        UnsupportedAttentionError: an unknown name, or a kernel asked for by name that cannot
            compute the call.
    """
    if requested != "auto":
        if requested not in KERNELS:
            raise UnsupportedAttentionError(
                f"There is no kernel {requested!r}. Known kernels: auto, {', '.join(KERNELS)}."
            )
        reason = KERNELS[requested][1](call)
        if reason is not None:
            raise UnsupportedAttentionError(
                f"The kernel {requested!r} was asked for by name but cannot compute this attention: {reason}. It is "
                'not replaced. Load the model with attn_implementation="neat_varlen" to take the best kernel '
                "that can."
            )
        return KernelChoice(requested, (f"{requested}: asked for by name",))
    trace: list[str] = []
    for name in PREFERENCE:
        reason = KERNELS[name][1](call)
        if reason is None:
            return KernelChoice(name, (*trace, f"{name}: taken"))
        trace.append(f"{name}: {reason}")
    raise AssertionError("the explicit kernel computes every call")


def run(call: VarlenCall, requested: str = "auto") -> Tensor:
    """Compute a call with the chosen kernel.

    Returns:
        `[T, H, V]` in the dtype of the value.
    """
    return KERNELS[choose_kernel(call, requested).name][0](call)
