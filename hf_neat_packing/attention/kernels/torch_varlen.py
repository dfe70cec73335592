"""Torch's own varlen attention (CUDA, half precision): one launch for the whole row.

Legend: see `call`.
"""

import torch
from torch import Tensor

from ..._compat import torch_varlen_attention, torch_varlen_groups_heads
from . import half_precision
from .call import VarlenCall


def why_not(call: VarlenCall) -> str | None:
    """Say what in the call this kernel cannot compute, or None."""
    if torch_varlen_attention() is None:
        return (
            f"torch {torch.__version__} has no torch.nn.attention.varlen with a scale and a window"
        )
    return half_precision.why_not(call, lacks=("softcap", "sinks", "mask", "dropout"))


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document in one launch; `max_seqlen` is a host integer.

    Returns:
        `[T, H, V]` in the dtype of the query.
    """
    varlen = torch_varlen_attention()
    assert varlen is not None
    query, key, value = half_precision.one_head_dim(call, multiple_of=8)
    options = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and torch_varlen_groups_heads():
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out: Tensor = varlen(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        scale=half_precision.scale_of(call),
        window_size=half_precision.window_of(call),
        **options,
    )
    return out[..., : call.value.shape[-1]]
