"""The attention function behind the key `neat_varlen`.

With boundaries it is block-diagonal attention over documents, whose cost is the sum of squared
lengths; without, it is what `sdpa` does. What it cannot honour it refuses; it drops nothing.

Legend: `B` rows, `H` query heads, `K` key heads, `S` queries, `S'` keys, `D` head dim, `V` value
head dim, `L` tokens of one document.
"""

from typing import Any

import torch
from torch import Tensor

from .._compat import is_tracing, sdpa_attention_forward
from ..errors import UnsupportedAttentionError
from .boundaries import find_boundaries
from .dense import dense_attention
from .inside import mask_of_chosen, reach
from .mask_entry import LazyMask
from .packed import packed_call, run_in_rows
from .towers import without_text_boundaries
from .traced import find_traced_boundaries, traced_attention


def neat_varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    kernel: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend inside documents where the call has boundaries, like `sdpa` where it has none.

    Args:
        module: the attention module; its `is_causal` counts where the argument is not given.
        query: `[B, H, S, D]`.
        key: `[B, K, S', D]`.
        value: `[B, K, S', V]`.
        attention_mask: a `LazyMask`, a 4-D mask, or None.
        scaling: factor on the scores; None means `D ** -0.5`.
        dropout: probability of zeroing an attention weight; 0.0 in evaluation.
        is_causal: whether a query sees only what is before it, where no mask says so.
        sliding_window: window in tokens, counted with the query itself, where no mask says so.
        softcap: soft capping of the scores.
        s_aux: `[H]` attention sinks.
        position_bias: additive `[1 or B, H, S, S']`.
        sinks: `[B, H, S, 1]` attention sinks, one for every query.
        indices: integer `[B, S, chosen]`, the keys that an indexer chose for each query (sparse
            attention); a key counts only where the mask allows it too.
        kernel: a kernel by name, or `auto`.
        **kwargs: what the model passes on: varlen kwargs, `_packed_seq_ids`, `position_ids`, ...

    Returns:
        `[B, S, H, V]` and None (no attention weights).

    Raises:
        BoundaryError: boundaries that are incomplete or do not fit this call.
        UnsupportedAttentionError: an option that cannot be honoured.
    """
    if kwargs.get("head_mask") is not None:
        raise UnsupportedAttentionError(
            "neat_varlen attention has no head_mask and will not drop it. Load the model with "
            'attn_implementation="eager" to use head masks.'
        )
    query, key = _in_dtype_of(value, query), _in_dtype_of(value, key)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    kwargs = without_text_boundaries(module, kwargs)
    tracing = is_tracing()
    boundaries = None if tracing else find_boundaries(query, key, attention_mask, kwargs)
    traced = find_traced_boundaries(query, key, kwargs) if tracing else None
    if boundaries is None and traced is None:
        dense = attention_mask
        if isinstance(attention_mask, LazyMask):
            dense = attention_mask.recipe.as_sdpa()
        if indices is not None:
            dense = mask_of_chosen(indices, attention_mask, key.shape[2], is_causal=bool(causal))
        if any(option is not None for option in (softcap, s_aux, sinks, position_bias)):
            return dense_attention(
                query, key, value, dense, is_causal=causal, scaling=scaling, dropout=dropout,
                softcap=softcap, sinks=s_aux if sinks is None else sinks, position_bias=position_bias,
            ), None  # fmt: skip
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            dense,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return output, None
    options: dict[str, Any] = {
        "scaling": scaling, "dropout": dropout, "softcap": softcap,
        "sinks": s_aux if sinks is None else sinks, "position_bias": position_bias, "indices": indices,
    }  # fmt: skip
    if traced is not None:
        return traced_attention(
            query, key, value, traced, attention_mask, causal=bool(causal),
            sliding_window=sliding_window, kernel=kernel, **options,
        ), None  # fmt: skip
    assert boundaries is not None
    seen = reach(attention_mask, bool(causal), sliding_window)
    call = packed_call(query, key, value, boundaries, seen, **options)
    return run_in_rows(call, kernel, query.shape[0]), None


def _in_dtype_of(value: Tensor, other: Tensor) -> Tensor:
    """Give queries or keys the dtype of the values, which is what the output projection takes.

    They differ under autocast, where rotary tables are float32, and behind float32 norms in a half-precision model.
    """
    return other if other.dtype == value.dtype else other.to(value.dtype)
