"""The operator that `torch.compile` and `torch.export` put into a graph for one attention call.

It reads the boundaries when it runs and does what the eager code does. Its backward computes the call once
more and differentiates that, so nothing but the inputs is kept.

Legend: see `forward`.
"""

from typing import Any

import torch
from torch import Tensor

from .._compat import autograd_inside_operator
from ..errors import UnsupportedAttentionError
from ..offsets import without_padded_offsets
from .boundaries import boundaries_from_map, checked_offsets
from .inside import NO_INTERVAL, Reach, reach
from .packed import packed_call, run_in_rows


def _reach_of_interval(interval: Tensor, cu_seqlens: Tensor) -> Reach:
    """Say an interval of keys as a window where it is one, else as a mask of each document.

    Raises:
        UnsupportedAttentionError: a query whose keys are not one interval.
    """
    rows, size = interval.shape[1:]
    offset = torch.arange(rows)[:, None] * size
    first, last = interval.cpu().long()
    if bool((first == NO_INTERVAL).any()):
        raise UnsupportedAttentionError(
            "In a compiled graph, the mask of this model lets a query see keys that are not one interval of its row. "
            "It cannot be cut into documents there. Run the model without torch.compile, or load it with "
            'attn_implementation="sdpa" and the 4-D masks of DataCollatorForNeatPacking(model).'
        )
    first, last = ((x + offset).flatten() for x in (first, last))
    cu = cu_seqlens.cpu().long()
    if rows == 1:
        repeats = int(cu[-1]) // size
        shift = (torch.arange(repeats) * size).repeat_interleave(size)
        first, last = first.repeat(repeats) + shift, last.repeat(repeats) + shift
    token = torch.arange(first.numel())
    start = torch.repeat_interleave(cu[:-1], cu.diff())
    stop = torch.repeat_interleave(cu[1:], cu.diff())
    first, last = torch.maximum(first, start), torch.minimum(last, stop - 1)
    # A query that sees nothing (padding) sees itself: no softmax is empty.
    nothing = first > last
    first, last = (torch.where(nothing, token, x) for x in (first, last))
    left = int((token - first).max())
    right = int((last - token).max())
    if torch.equal(first, torch.maximum(start, token - left)) and torch.equal(
        last, torch.minimum(stop - 1, token + right)
    ):
        longest = int(cu.diff().max()) - 1
        # A reach to the end of every document is none.
        return Reach(
            None if left >= longest else left, None if right >= longest > 0 else max(right, 0)
        )

    def block(begin: int, end: int) -> Tensor:
        keys = torch.arange(begin, end)
        seen = (keys >= first[begin:end, None]) & (keys <= last[begin:end, None])
        return seen[None, None].to(interval.device)

    return Reach(None, None, mask=block)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    document_map: Tensor | None,
    interval: Tensor | None,
    dense: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor | None,
    seed: Tensor | None,
    left: int | None,
    right: int | None,
    chunk: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    kernel: str,
) -> Tensor:
    """Do what the eager code does, now that there are values."""
    if cu_seqlens is not None:
        offsets = without_padded_offsets(cu_seqlens)
        boundaries = checked_offsets(query, offsets, None)
    else:
        assert document_map is not None
        boundaries = boundaries_from_map(query, key, document_map)
    if interval is not None:
        seen = _reach_of_interval(interval, boundaries.cu_seqlens)
    elif dense is not None:
        seen = reach(dense, causal=True, sliding_window=None)
    else:
        seen = Reach(left, right, chunk)
    call = packed_call(
        query, key, value, boundaries, seen, scaling=scaling, dropout=dropout, softcap=softcap,
        sinks=sinks, position_bias=position_bias, indices=indices,
    )  # fmt: skip
    if seed is None:
        return run_in_rows(call, kernel, query.shape[0])
    devices = [query.device] if query.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        return run_in_rows(call, kernel, query.shape[0])


@torch.library.custom_op("hf_neat_packing::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    document_map: Tensor | None,
    interval: Tensor | None,
    dense: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor | None,
    seed: Tensor | None,
    left: int | None,
    right: int | None,
    chunk: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    kernel: str,
) -> Tensor:
    """Compute the attention of one call, `[B, S, H, V]`; arguments as in `packed_call`.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, K, S, D]`.
        value: `[B, K, S, V]`.
        cu_seqlens: integer `[N+1]`, its end possibly padded, or None.
        document_map: `[B, S]` where there are no offsets.
        interval: int32 `[2, 1 or B, S]`, the first and last key that the mask of the row lets a query see.
        dense: a mask of the whole row, `[1 or B, 1 or H, S, S]`, that is no interval.
        position_bias: additive `[1 or B, H, S, S]`.
        sinks: `[H]` or `[B, H, S, 1]`.
        indices: integer `[B, S, chosen]`.
        seed: int64 `[1]` on the host where there is dropout.
        left: keys before the query where no mask says it.
        right: keys after the query.
        chunk: tokens of an attention chunk.
        scaling: factor on the scores.
        dropout: probability of zeroing a weight.
        softcap: soft capping of the scores.
        kernel: a kernel by name, or `auto`.

    Raises:
        BoundaryError: boundaries that do not describe these tokens.
        UnsupportedAttentionError: a mask that cannot be cut into documents.
    """
    return _compute(
        query, key, value, cu_seqlens, document_map, interval, dense, position_bias, sinks, indices, seed,
        left, right, chunk, scaling, dropout, softcap, kernel,
    ).contiguous()  # fmt: skip


@packed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    rows, heads, size, _ = query.shape
    return value.new_empty(rows, size, heads, value.shape[-1])


@torch.library.custom_op("hf_neat_packing::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    document_map: Tensor | None,
    interval: Tensor | None,
    dense: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor | None,
    seed: Tensor | None,
    left: int | None,
    right: int | None,
    chunk: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    kernel: str,
) -> list[Tensor]:
    floating = [query, key, value, *_floating(dense, position_bias, sinks)]
    with autograd_inside_operator():
        leaves = [x.detach().requires_grad_() for x in floating]
        rest = iter(leaves[3:])
        again = [
            x if x is None or not x.is_floating_point() else next(rest)
            for x in (dense, position_bias, sinks)
        ]
        query, key, value = leaves[:3]
        output = _compute(
            query, key, value, cu_seqlens, document_map, interval, again[0], again[1], again[2], indices, seed,
            left, right, chunk, scaling, dropout, softcap, kernel,
        )  # fmt: skip
        grads = torch.autograd.grad(output, leaves, grad, materialize_grads=True)
    return [x.contiguous() for x in grads]


@_packed_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    document_map: Tensor | None,
    interval: Tensor | None,
    dense: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    floating = [query, key, value, *_floating(dense, position_bias, sinks)]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in floating]


def _floating(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None and x.is_floating_point()]


_NUM_TENSORS = 11


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    grads = iter(_packed_attention_backward(grad, *inputs, *ctx.options))
    # Query, key, value, then what of dense mask, position bias and sinks is there.
    wanted = (0, 1, 2, 6, 7, 8)
    found = [
        next(grads) if n in wanted and x is not None and x.is_floating_point() else None
        for n, x in enumerate(inputs)
    ]
    return (*found, *(None for _ in ctx.options))


packed_attention.register_autograd(_differentiate, setup_context=_save_inputs)
