"""Unpacked attention with the options that `sdpa` has not: soft capping, sinks, position bias.

Legend: see `forward`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from .kernels.explicit import softmax_with_sinks
from .mask_entry import LazyMask


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    is_causal: bool,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """Compute masked attention from its definition, as transformers' eager attention does.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, K, S', D]`.
        value: `[B, K, S', V]`.
        attention_mask: `LazyMask`, 4-D mask (bool or additive) or None.
        is_causal: counts where there is no mask; the last query sees the last key.
        scaling: factor on the scores; None means `D ** -0.5`.
        dropout: probability of zeroing a weight.
        softcap: soft capping of the scores.
        sinks: `[H]`, or `[B, H, S, 1]` with one for every query.
        position_bias: additive, `[1 or B, H, S, S']`.

    Returns:
        `[B, S, H, V]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias[..., : scores.shape[-1]]
    mask = attention_mask.recipe.dense() if isinstance(attention_mask, LazyMask) else attention_mask
    if mask is None and is_causal and scores.shape[2] > 1:
        queries, keys = scores.shape[2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if mask is not None:
        mask = mask[..., : scores.shape[-1]]
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None and sinks.ndim == 4:
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        weights = softmax_with_sinks(scores, None)[..., :-1]
    else:
        weights = softmax_with_sinks(scores, sinks)
    return (drop(weights.to(value.dtype), dropout) @ value).transpose(1, 2)
