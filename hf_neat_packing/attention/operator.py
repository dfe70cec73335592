"""The operator that `torch.compile` and `torch.export` put into a graph for one attention call.

It reads the boundaries when it runs and does what the eager code does. Its backward computes the call once
more and differentiates that, so nothing but the inputs is kept.

Legend: see `forward`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import autograd_inside_operator
from ..errors import UnsupportedAttentionError
from .boundaries import boundaries_from_map, checked_offsets
from .inside import NO_INTERVAL, Reach, in_stream, reach
from .packed import packed_call, run_in_rows


def _reach_of_interval(interval: Tensor, cu_seqlens: Tensor) -> Reach:
    """Say an interval of keys as a window where it is one, else as a mask of each document.

    Raises:
        UnsupportedAttentionError: a query whose keys are not one interval.
    """
    host = interval.cpu().long()
    if bool((host == NO_INTERVAL).any()):
        raise UnsupportedAttentionError(
            "In a compiled graph, the mask of this model lets a query see keys that are not one interval of its row. "
            "It cannot be cut into documents there. Run the model without torch.compile, or load it with "
            'attn_implementation="sdpa" and the 4-D masks of DataCollatorForNeatPacking(model).'
        )
    cu = cu_seqlens.cpu().long()
    first, last = in_stream(host, int(cu[-1]))
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


# The arguments of the operator, once: torch reads them from here, not from a signature.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens, Tensor? document_map, Tensor? interval, "
    "Tensor? dense, Tensor? position_bias, Tensor? sinks, Tensor? indices, Tensor? seed, "
    "SymInt? left, SymInt? right, SymInt? chunk, float? scaling, float dropout, float? softcap, str kernel"
)
_NUM_TENSORS = 11
# Those that may have a gradient: query, key, value, dense mask, position bias, sinks.
_DIFFERENTIABLE = (0, 1, 2, 6, 7, 8)


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
        boundaries = checked_offsets(query, cu_seqlens, None)
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


@torch.library.custom_op(
    "hf_neat_packing::packed_attention", mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
def packed_attention(*inputs: Any) -> Tensor:
    """Compute the attention of one call, `[B, S, H, V]`; most arguments are those of `packed_call`.

    Args:
        *inputs: `query` `[B, H, S, D]`; `key` `[B, K, S, D]`; `value` `[B, K, S, V]`;
            `cu_seqlens` integer `[N+1]`, its end possibly padded, or None;
            `document_map` `[B, S]` where there are no offsets;
            `interval` int32 `[2, 1 or B, S]`, the first and last key that the mask of the row lets a query see;
            `dense`, a mask of the whole row `[1 or B, 1 or H, S, S]` that is no interval;
            `position_bias`, `sinks`, `indices`;
            `seed` int64 `[1]` on the host where there is dropout;
            `left`, `right`, `chunk`: what a query sees where no mask says it;
            `scaling`, `dropout`, `softcap`, and `kernel` by name, or `auto`.

    Raises:
        BoundaryError: boundaries that do not describe these tokens.
        UnsupportedAttentionError: a mask that cannot be cut into documents.
    """
    return _compute(*inputs).contiguous()


@packed_attention.register_fake
def _(*inputs: Any) -> Tensor:
    query, value = inputs[0], inputs[2]
    rows, heads, size, _ = query.shape
    output: Tensor = value.new_empty(rows, size, heads, value.shape[-1])
    return output


@torch.library.custom_op(
    "hf_neat_packing::packed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}) -> Tensor[]",
)
def _packed_attention_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
    again = list(inputs)
    with autograd_inside_operator():
        for place in _floating(inputs):
            again[place] = inputs[place].detach().requires_grad_()
        leaves = [again[place] for place in _floating(inputs)]
        grads = torch.autograd.grad(_compute(*again), leaves, grad, materialize_grads=True)
    return [x.contiguous() for x in grads]


@_packed_attention_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> list[Tensor]:
    return [
        torch.empty_like(inputs[place], memory_format=torch.contiguous_format)
        for place in _floating(inputs)
    ]


def _floating(inputs: Sequence[Any]) -> list[int]:
    """List the places of inputs that a gradient is computed for; a boolean mask has none."""
    return [
        place
        for place in _DIFFERENTIABLE
        if inputs[place] is not None and inputs[place].is_floating_point()
    ]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = (*ctx.saved_tensors, *ctx.options)
    found: list[Tensor | None] = [None] * len(inputs)
    grads = _packed_attention_backward(grad, *inputs)
    for place, gradient in zip(_floating(inputs), grads, strict=True):
        found[place] = gradient
    return tuple(found)


packed_attention.register_autograd(_differentiate, setup_context=_save_inputs)
