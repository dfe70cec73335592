"""Torch's own varlen attention (CUDA, half precision): one launch for the whole row.

Legend: see `call`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._compat import torch_varlen_attention
from .call import VarlenCall

# torch.nn.attention.varlen wraps FlashAttention-2, whose limits these are.
MAX_HEAD_DIM = 256


def why_not(call: VarlenCall) -> str | None:
    """Say what in the call this kernel cannot compute, or None."""
    if torch_varlen_attention() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if call.query.device.type != "cuda":
        return f"it needs CUDA tensors, the call is on {call.query.device.type}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the call is in {call.query.dtype}"
    if max(call.query.shape[-1], call.value.shape[-1]) > MAX_HEAD_DIM:
        return f"head_dim {max(call.query.shape[-1], call.value.shape[-1])} is above its limit {MAX_HEAD_DIM}"
    for option, name in (
        (call.softcap, "softcap"),
        (call.sinks, "sinks (s_aux)"),
        (call.mask, "a mask of its own inside documents"),
        (call.dropout or None, "dropout"),
    ):
        if option is not None:
            return f"it has no {name}"
    return None


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document in one launch; `max_seqlen` is a host integer.

    Returns:
        `[T, H, V]` in the dtype of the query.
    """
    varlen = torch_varlen_attention()
    assert varlen is not None
    query, key, value = call.query, call.key, call.value
    dim, value_dim = query.shape[-1], value.shape[-1]
    # The kernel wants one head dim, in steps of 8; zero columns change neither scores nor outputs.
    width = -(-max(dim, value_dim) // 8) * 8
    scale = dim**-0.5 if call.scale is None else call.scale
    query, key, value = (
        x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
    )
    out: Tensor = varlen(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        scale=scale,
        window_size=tuple(-1 if reach is None else reach for reach in (call.left, call.right)),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[..., :value_dim]
