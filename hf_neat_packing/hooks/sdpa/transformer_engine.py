"""Transformer Engine's fused attention (CUDA, half precision) over documents, where it is installed.

Legend: see `attention.kernels.call`.
"""

import importlib
import importlib.util

import torch
from torch import Tensor

from ...attention.kernels import VarlenCall


def why_not(call: VarlenCall) -> str | None:
    """Say what in the call this backend cannot compute, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed"
    if call.query.device.type != "cuda":
        return f"it needs CUDA tensors, the call is on {call.query.device.type}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the call is in {call.query.dtype}"
    if call.query.shape[-1] != call.value.shape[-1]:
        return f"it wants one head dim, got {call.query.shape[-1]} and {call.value.shape[-1]}"
    for option, name in (
        (call.mask, "a mask of its own inside documents"),
        (call.dropout or None, "dropout that activation recompute reproduces"),
        (call.left, "a window"),
        (call.softcap, "softcap"),
        (call.sinks, "sinks"),
    ):
        if option is not None:
            return f"it has no {name}"
    return None


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document with `DotProductAttention` in its `thd` layout.

    Returns:
        `[T, H, V]` in the dtype of the query.
    """
    engine = importlib.import_module("transformer_engine.pytorch")
    heads, dim = call.query.shape[1:]
    compute = engine.DotProductAttention(
        heads,
        dim,
        num_gqa_groups=call.key.shape[1],
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal" if call.right == 0 else "padding",
        softmax_scale=call.scale,
    )
    output: Tensor = compute(
        call.query.contiguous(),
        call.key.contiguous(),
        call.value.contiguous(),
        cu_seqlens_q=call.cu_seqlens,
        cu_seqlens_kv=call.cu_seqlens,
        max_seqlen_q=call.max_seqlen,
        max_seqlen_kv=call.max_seqlen,
    )
    return output.reshape(-1, heads, call.value.shape[-1])
