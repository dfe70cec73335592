"""The attention under `torch.compile` and `torch.export`: one opaque operator a call, no graph break.

Which documents a row holds is data, and a graph may not depend on data. So the whole call becomes one
operator (see `operator`) that reads the boundaries when it runs.

A mask that the graph has built is not read whole: what transformers lets a query see is one interval of keys,
and the interval, `[B, S]`, is all that reaches the operator. A compiler that fuses never builds the square.

Where one launch of torch's own varlen operator computes the call, that operator goes into the graph itself.

Legend: see `forward`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import assert_on_device
from .boundaries import DOCUMENT_MAP_KWARG, Boundaries, all_varlen_kwargs, check_map_shape
from .boundary_checks import check_same_shape, check_same_tokens, describes
from .inside import Reach, in_stream, interval_of, reach
from .kernels import choose_kernel
from .mask_entry import CHUNK, LOCAL_SIZE, LazyMask
from .operator import packed_attention
from .packed import packed_call, run_in_rows


class TracedBoundaries(NamedTuple):
    """Boundaries whose values nobody has looked at: offsets, or else the document map.

    Attributes:
        cu_seqlens: int32 `[N+1]`, possibly padded at its end with repetitions of the last offset, or None.
        document_map: `[B, S]` where there are no offsets.
        max_seqlen: at least the tokens of the longest document.
    """

    cu_seqlens: Tensor | None
    document_map: Tensor | None
    max_seqlen: int


def find_traced_boundaries(
    query: Tensor, key: Tensor, kwargs: Mapping[str, Any]
) -> TracedBoundaries | None:
    """Find the boundaries of a call that is being traced: offsets first, then the document map.

    Restarting positions alone are left to the mask that transformers builds of them.

    Raises:
        BoundaryError: offsets that are half there, or shapes that cannot fit.
    """
    values = all_varlen_kwargs(kwargs)
    if values is not None:
        check_same_tokens(query, key)
        cu_q, cu_k, max_q, _ = values
        if cu_k is not cu_q:
            check_same_shape(cu_q, cu_k)
            assert_on_device((cu_q == cu_k).all(), "cu_seq_lens_q and cu_seq_lens_k must be equal")
        return TracedBoundaries(cu_q, None, max_q)
    document_map = kwargs.get(DOCUMENT_MAP_KWARG)
    if document_map is None:
        return None
    check_map_shape(query, key, document_map)
    return TracedBoundaries(None, document_map, query.shape[2])


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: TracedBoundaries,
    attention_mask: Tensor | None,
    *,
    causal: bool,
    sliding_window: int | None,
    kernel: str,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    indices: Tensor | None,
) -> Tensor:
    """Put the attention of one layer into the graph; the arguments are those of `packed_call`.

    Returns:
        `[B, S, H, V]`.
    """
    options: dict[str, Any] = {
        "scaling": scaling, "dropout": dropout, "softcap": softcap, "sinks": sinks,
        "position_bias": position_bias, "indices": indices,
    }  # fmt: skip
    seen, mask = _read_mask(attention_mask, causal, sliding_window)
    interval = dense = None
    if mask is not None and mask.dtype == torch.bool and mask.shape[1] == 1:
        interval = interval_of(mask)
    elif mask is not None:
        dense = mask
    if boundaries.cu_seqlens is not None:
        plain = _static_reach(seen, mask, causal, sliding_window)
        if plain is not None:
            cu = boundaries.cu_seqlens.to(torch.int32)
            found = Boundaries(cu, boundaries.max_seqlen, None, "varlen kwargs")
            call = packed_call(query, key, value, found, plain, **options)
            if choose_kernel(call, kernel).name == "torch_varlen":
                _assert_described(cu, call.query.shape[0], found.max_seqlen, plain, interval)
                return run_in_rows(call, kernel, query.shape[0])
    # Drawn in the graph, so that the second computation drops the same weights.
    seed = torch.randint(2**62, (1,), device="cpu") if dropout > 0 else None
    output: Tensor = packed_attention(
        query, key, value, boundaries.cu_seqlens, boundaries.document_map, interval, dense,
        position_bias, sinks, indices, seed, seen.left, seen.right, seen.chunk, scaling, dropout, softcap, kernel,
    )  # fmt: skip
    return output


def _read_mask(
    attention_mask: Tensor | None, causal: bool, sliding_window: int | None
) -> tuple[Reach, Tensor | None]:
    """Say what a query sees inside its document; where only a mask tells, the mask."""
    if isinstance(attention_mask, LazyMask):
        # Only the layer is compiled: the mask was described before, outside the graph.
        if attention_mask.recipe.pattern is not None:
            return reach(attention_mask, causal, sliding_window), None
        attention_mask = attention_mask.recipe.dense()
    if attention_mask is None:
        return reach(None, causal, sliding_window), None
    chunk = getattr(attention_mask, CHUNK, None)
    if chunk is not None:
        return Reach(None, 0, chunk), None
    return Reach(None, None), attention_mask


def _assert_described(
    cu_seqlens: Tensor, num_tokens: int, max_seqlen: int, plain: Reach, interval: Tensor | None
) -> None:
    """Check on the device what the graph has taken for granted: the offsets, and the window of the mask."""
    assert_on_device(
        describes(cu_seqlens, num_tokens, max_seqlen),
        "cu_seq_lens_q must rise strictly from 0 to the number of tokens, and no document be longer than max_length_q",
    )
    if interval is None:
        return
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    start, stop = cu_seqlens[document - 1], cu_seqlens[document]
    first, last = start, stop - 1
    if plain.left is not None:
        first = torch.maximum(first, token - plain.left)
    if plain.right is not None:
        last = torch.minimum(last, token + plain.right)
    lowest, highest = in_stream(interval, num_tokens)
    # A mask that transformers made without the boundaries sees more; nothing outside a document counts.
    same = (torch.maximum(lowest, start) == first) & (torch.minimum(highest, stop - 1) == last)
    assert_on_device(
        same.all(), "the mask lets a query see other keys than the window of its layer; load the model with "
        'attn_implementation="neat_varlen:sdpa"'
    )  # fmt: skip


def _static_reach(
    seen: Reach, mask: Tensor | None, causal: bool, sliding_window: int | None
) -> Reach | None:
    """Say what the graph may take for granted of a layer's window, or None where only the values tell."""
    if mask is None:
        return seen if seen.chunk is None else None
    if getattr(mask, LOCAL_SIZE, "unknown") != sliding_window:
        return None
    return Reach(None if sliding_window is None else sliding_window - 1, 0 if causal else None)
