"""What the CUDA varlen kernels have in common: FlashAttention's devices, dtypes, head dims and windows.

Legend: see `call`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .call import VarlenCall

MAX_HEAD_DIM = 256


def why_not(call: VarlenCall, *, lacks: tuple[str, ...]) -> str | None:
    """Say what in the call a kernel of this family cannot compute, or None.

    Args:
        call: the call.
        lacks: options that the kernel has not: names of `_OPTIONS`.
    """
    if call.query.device.type != "cuda":
        return f"it needs CUDA tensors, the call is on {call.query.device.type}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the call is in {call.query.dtype}"
    head_dim = max(call.query.shape[-1], call.value.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above its limit {MAX_HEAD_DIM}"
    for option in lacks:
        wanted = call.dropout > 0 if option == "dropout" else getattr(call, option) is not None
        if wanted:
            return f"it has no {_OPTIONS[option]}"
    return None


_OPTIONS = {
    "softcap": "softcap",
    "sinks": "sinks (s_aux)",
    "mask": "a mask of its own inside documents",
    "dropout": "dropout",
}


def one_head_dim(call: VarlenCall, *, multiple_of: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pad query, key and value to one head dim; zero columns change neither scores nor outputs."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    width = -(-width // multiple_of) * multiple_of

    def padded(x: Tensor) -> Tensor:
        return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))

    return padded(call.query), padded(call.key), padded(call.value)


def scale_of(call: VarlenCall) -> float:
    """Return the factor on the scores, which padding must not change."""
    return float(call.query.shape[-1] ** -0.5) if call.scale is None else call.scale


def window_of(call: VarlenCall) -> tuple[int, int]:
    """Return the window as the kernels take it: -1 where it is open."""
    return (-1 if call.left is None else call.left, -1 if call.right is None else call.right)
