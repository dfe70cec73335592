"""The attention function behind the key `neat_varlen`.

With boundaries it is block-diagonal attention over documents, whose cost is the sum of squared
lengths; without, it is what `sdpa` does. What it cannot honour it refuses; it drops nothing.

Legend: `B` rows, `H` query heads, `K` key heads, `S` queries, `S'` keys, `D` head dim, `V` value
head dim, `L` tokens of one document.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from .._compat import sdpa_attention_forward
from ..errors import UnsupportedAttentionError
from .boundaries import Boundaries, find_boundaries
from .dense import dense_attention
from .kernels import DocumentMask, VarlenCall, run
from .mask_entry import LazyMask
from .towers import without_text_boundaries


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
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    kwargs = without_text_boundaries(module, kwargs)
    boundaries = find_boundaries(query, key, attention_mask, kwargs)
    if boundaries is None:
        if softcap is not None or s_aux is not None or position_bias is not None:
            return dense_attention(
                query, key, value, attention_mask, is_causal=causal, scaling=scaling, dropout=dropout,
                softcap=softcap, sinks=s_aux, position_bias=position_bias,
            ), None  # fmt: skip
        dense = attention_mask
        if isinstance(attention_mask, LazyMask):
            dense = attention_mask.recipe.as_sdpa()
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
    left, right, chunk, mask = _reach(attention_mask, bool(causal), sliding_window)
    if position_bias is not None:
        mask, left, right = _with_bias(position_bias, mask, left, right, query.shape[2]), None, None
    if chunk is not None:
        boundaries = _cut_into_chunks(boundaries, chunk, query.device)
    call = VarlenCall(
        query=query.transpose(1, 2).flatten(0, 1),
        key=key.transpose(1, 2).flatten(0, 1),
        value=value.transpose(1, 2).flatten(0, 1),
        cu_seqlens=boundaries.cu_seqlens,
        max_seqlen=boundaries.max_seqlen,
        lengths=boundaries.lengths,
        left=left,
        right=right,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        mask=mask,
    )
    return run(call, kernel).unflatten(0, (query.shape[0], query.shape[2])), None


def _reach(
    attention_mask: Any, causal: bool, sliding_window: int | None
) -> tuple[int | None, int | None, int | None, DocumentMask | None]:
    """Say what a query sees inside its document: `(left, right, chunk, mask)`."""
    if attention_mask is None:
        if sliding_window is not None and not causal:
            raise UnsupportedAttentionError(
                f"A bidirectional attention came with sliding_window={sliding_window} and no mask: whether the window "
                "counts both sides is not defined without one. Build the mask with "
                "transformers' create_bidirectional_sliding_window_mask."
            )
        left = None if sliding_window is None else sliding_window - 1
        return left, 0 if causal else None, None, None
    if isinstance(attention_mask, LazyMask):
        recipe = attention_mask.recipe
        if recipe.pattern is None:
            return None, None, None, recipe.block
        return recipe.pattern.left, recipe.pattern.right, recipe.pattern.chunk, None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        shape = (
            list(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise UnsupportedAttentionError(
            f"Attention got boundaries beside an attention_mask of {shape}. Only 4-D masks ([batch, heads, queries, "
            "keys]) can be read beside them. Send no attention_mask beside varlen kwargs."
        )
    mask = attention_mask

    def block(start: int, stop: int) -> Tensor:
        row, first = divmod(start, mask.shape[2])
        rows = mask[row : row + 1] if mask.shape[0] > 1 else mask
        return rows[:, :, first : first + stop - start, first : first + stop - start]

    return None, None, None, block


def _with_bias(
    bias: Tensor, mask: DocumentMask | None, left: int | None, right: int | None, row_length: int
) -> DocumentMask:
    """Add a position bias to what a query sees; a relative bias is the same on every diagonal block."""

    def block(start: int, stop: int) -> Tensor:
        row, first = divmod(start, row_length)
        length = stop - start
        rows = bias[row : row + 1] if bias.shape[0] > 1 else bias
        piece = rows[:, :, first : first + length, first : first + length]
        lowest = torch.finfo(bias.dtype).min
        if mask is not None:
            seen = mask(start, stop)
            return torch.where(seen, piece, lowest) if seen.dtype == torch.bool else piece + seen
        distance = torch.arange(length, device=bias.device)
        distance = distance[None, :] - distance[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
        return piece.masked_fill(hidden, lowest)

    return block


def _cut_into_chunks(boundaries: Boundaries, chunk: int, device: torch.device) -> Boundaries:
    """Chunked attention is attention inside chunks that are counted from each document's start."""
    lengths = boundaries.lengths
    if lengths is None:
        lengths = tuple(boundaries.cu_seqlens.diff().tolist())
    pieces = tuple(
        min(chunk, length - first) for length in lengths for first in range(0, length, chunk)
    )
    offsets = torch.tensor([0, *itertools.accumulate(pieces)], dtype=torch.int32, device=device)
    return Boundaries(offsets, max(pieces), pieces, boundaries.source)
