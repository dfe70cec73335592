"""The flash-attn package (CUDA, half precision), where it is installed.

Legend: see `call`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import half_precision
from .call import VarlenCall


def _function() -> Callable[..., Any] | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)


def why_not(call: VarlenCall) -> str | None:
    """Say what in the call this kernel cannot compute, or None."""
    if call.query.device.type == "cuda" and _function() is None:
        return "the package flash-attn is not installed"
    return half_precision.why_not(call, lacks=("sinks", "mask"))


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document with `flash_attn_varlen_func`.

    Returns:
        `[T, H, V]` in the dtype of the query.
    """
    function = _function()
    assert function is not None
    out: Tensor = function(
        *half_precision.one_head_dim(call),
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        dropout_p=call.dropout,
        softmax_scale=half_precision.scale_of(call),
        causal=call.right == 0,
        window_size=half_precision.window_of(call),
        softcap=call.softcap or 0.0,
    )
    return out[..., : call.value.shape[-1]]
