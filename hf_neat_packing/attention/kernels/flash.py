"""The flash-attn package (CUDA, half precision), where it is installed.

Legend: see `call`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .call import VarlenCall

MAX_HEAD_DIM = 256


def _function() -> Callable[..., Any] | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)


def why_not(call: VarlenCall) -> str | None:
    """Say what in the call this kernel cannot compute, or None."""
    if call.query.device.type != "cuda":
        return f"it needs CUDA tensors, the call is on {call.query.device.type}"
    if _function() is None:
        return "the package flash-attn is not installed"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the call is in {call.query.dtype}"
    if max(call.query.shape[-1], call.value.shape[-1]) > MAX_HEAD_DIM:
        return f"head_dim {max(call.query.shape[-1], call.value.shape[-1])} is above its limit {MAX_HEAD_DIM}"
    for option, name in (
        (call.sinks, "sinks (s_aux)"),
        (call.mask, "a mask of its own inside documents"),
    ):
        if option is not None:
            return f"it has no {name}"
    return None


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document with `flash_attn_varlen_func`.

    Returns:
        `[T, H, V]` in the dtype of the query.
    """
    function = _function()
    assert function is not None
    query, key, value = call.query, call.key, call.value
    dim, value_dim = query.shape[-1], value.shape[-1]
    width = max(dim, value_dim)
    query, key, value = (
        x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
    )
    out: Tensor = function(
        query,
        key,
        value,
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        dropout_p=call.dropout,
        softmax_scale=dim**-0.5 if call.scale is None else call.scale,
        causal=call.right == 0,
        window_size=tuple(-1 if reach is None else reach for reach in (call.left, call.right)),
        softcap=call.softcap or 0.0,
    )
    return out[..., :value_dim]
