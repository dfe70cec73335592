"""`torch.nn.MultiheadAttention`, confined to the documents of packed rows.

Torch runs it as one function, projections and all, so that function is what is seen from outside. Where attention
weights are asked for, the dense form is computed, as it would be without packing: the weights are an `S x S`
tensor anyway.

Legend: `B` rows, `S` tokens in a row, `E` model width, `H` heads.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...errors import UnsupportedAttentionError
from .packed_attention import Armed, packed_attention
from .packed_rows import PackedRows

_parameters = lru_cache(maxsize=4)(inspect.signature)


def attended_shape(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, int] | None, bool]:
    """Return rows and tokens of a self-attention call, and whether it is causal or masked."""
    tensors = [*args[:2], *(kwargs[n] for n in ("query", "key") if n in kwargs)]
    if len(tensors) < 2 or not all(isinstance(x, Tensor) for x in tensors):
        return None, False
    query, key = tensors
    token_dim, row_dim = (0, 1) if name == "multi_head_attention_forward" else (-2, 0)
    if query.ndim < 3 or query.shape[token_dim] != key.shape[token_dim]:
        return None, False
    mask = kwargs.get("attn_mask", args[3] if token_dim == -2 and len(args) > 3 else None)
    causal = kwargs.get("is_causal", args[5] if token_dim == -2 and len(args) > 5 else False)
    return (query.shape[row_dim], query.shape[token_dim]), bool(causal) or mask is not None


def packed_multi_head_attention(
    armed: Armed, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Compute `torch.nn.functional.multi_head_attention_forward` inside each document.

    Args:
        armed: the rows and the backend.
        function: the function that was called.
        args: its positional arguments; query, key and value are `[S, B, E]` or `[S, E]`.
        kwargs: its other arguments.

    Returns:
        `[S, B, E]` or `[S, E]`, and the weights where they were asked for.

    Raises:
        UnsupportedAttentionError: cross-attention, or keys that belong to no document.
    """
    bound = _parameters(function).bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    query, key, value = call["query"], call["key"], call["value"]
    _require_self_attention(call, query, key)
    if query.ndim == 2:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    assert armed.rows is not None
    mask = _mask(call, query)
    if call["need_weights"]:
        _require_rows(armed.rows, query)
        call["attn_mask"] = _dense_mask(armed.rows, mask, query, call["num_heads"])
        call["key_padding_mask"], call["is_causal"] = None, False
        result: tuple[Tensor, Tensor | None] = function(*bound.args, **bound.kwargs)
        return result
    heads = [
        x.unflatten(-1, (call["num_heads"], -1)).permute(1, 2, 0, 3)
        for x in _projections(call, query, key, value)
    ]
    causal = call["is_causal"] and call["key_padding_mask"] is None
    output = packed_attention(
        armed,
        heads[0],
        heads[1],
        heads[2],
        attn_mask=None if causal else mask,
        dropout_p=call["dropout_p"] if call["training"] else 0.0,
        is_causal=causal,
    )
    output = linear(
        output.permute(2, 0, 1, 3).flatten(2), call["out_proj_weight"], call["out_proj_bias"]
    )
    return (output.squeeze(1) if call["query"].ndim == 2 else output), None


def _require_self_attention(call: dict[str, Any], query: Tensor, key: Tensor) -> None:
    same = query is key or (query.data_ptr(), query.shape, query.stride()) == (
        key.data_ptr(),
        key.shape,
        key.stride(),
    )
    if not same:
        raise UnsupportedAttentionError(
            f"MultiheadAttention got queries {list(query.shape)} and other keys {list(key.shape)} in a packed forward: "
            "cross-attention, whose keys the boundaries of the rows do not describe. Leave the module out "
            "with `modules=[...]`; then its documents are yours to keep apart."
        )
    for name in ("bias_k", "bias_v", "static_k", "static_v"):
        if call[name] is not None:
            raise UnsupportedAttentionError(
                f"MultiheadAttention with {name} has keys that belong to no document; packed rows have none. "
                "Build it with add_bias_kv=False."
            )
    if call["add_zero_attn"]:
        raise UnsupportedAttentionError(
            "MultiheadAttention with add_zero_attn=True has a key that belongs to no document. Build it without."
        )


def _require_rows(rows: PackedRows, query: Tensor) -> None:
    if (query.shape[1], query.shape[0]) != rows.shape:
        raise UnsupportedAttentionError(
            f"The packed rows have shape {list(rows.shape)}, MultiheadAttention got [sequence, batch, width] "
            f"{list(query.shape)}: other tokens, which these boundaries do not describe."
        )


def _mask(call: dict[str, Any], query: Tensor) -> Tensor | None:
    """Merge the two masks into one additive `[1 or B, 1 or H, S, S]`; True hides in a torch module's mask."""
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    merged = None
    if mask is not None:
        mask = mask.unflatten(0, (-1, call["num_heads"])) if mask.ndim == 3 else mask[None, None]
        merged = _additive(mask, query.dtype)
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        padding = _additive(padding[:, None, None], query.dtype)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _dense_mask(rows: PackedRows, mask: Tensor | None, query: Tensor, num_heads: int) -> Tensor:
    """Return additive `[B*H, S, S]`; padding sees itself, so that no row of a softmax is empty."""
    numbers = torch.zeros(rows.shape[0] * rows.shape[1], dtype=torch.int64)
    lengths = torch.tensor(rows.lengths, dtype=torch.int64)
    numbers[rows.tokens] = torch.repeat_interleave(torch.arange(1, lengths.numel() + 1), lengths)
    numbers = numbers.reshape(rows.shape).to(query.device)
    same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers != 0)[:, None, :]
    same |= torch.eye(rows.shape[1], dtype=torch.bool, device=query.device)
    dense = _additive(~same[:, None], query.dtype)
    if mask is not None:
        padding = (numbers == 0)[:, None, :, None]
        dense = dense + mask.masked_fill(padding, 0)
    return dense.expand(-1, num_heads, -1, -1).flatten(0, 1)


def _projections(call: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    bias = call["in_proj_bias"]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if call["use_separate_proj_weight"]:
        weights = [call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]]
    elif query is key and key is value:
        return list(linear(query, call["in_proj_weight"], bias).chunk(3, dim=-1))
    else:
        weights = list(call["in_proj_weight"].chunk(3))
    return [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
