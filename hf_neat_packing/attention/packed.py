"""Attention with boundaries: one kernel call over the documents of the flattened rows.

Legend: see `forward`.
"""

from torch import Tensor

from .boundaries import Boundaries
from .inside import Reach, cut_into_chunks, only_chosen, window_mask, with_bias
from .kernels import VarlenCall, run


def packed_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    reach: Reach,
    *,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    indices: Tensor | None,
) -> VarlenCall:
    """Lay the rows end to end and say what each query sees in its document.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, K, S, D]`.
        value: `[B, K, S, V]`.
        boundaries: the documents of the flattened rows.
        reach: what a query sees inside its document.
        scaling: factor on the scores; None means `D ** -0.5`.
        dropout: probability of zeroing an attention weight.
        softcap: soft capping of the scores.
        sinks: `[H]`, or `[B, H, S, 1]` with one for every query.
        position_bias: additive `[1 or B, H, S, S]`.
        indices: integer `[B, S, chosen]`, keys that an indexer chose.
    """
    left, right, chunk, mask = reach
    if indices is not None:
        mask = only_chosen(indices, mask or window_mask(left, right, query.device))
    if position_bias is not None:
        seen = mask or window_mask(left, right, query.device)
        mask = with_bias(position_bias, seen, query.shape[2])
    if mask is not None:
        left = right = None
    if chunk is not None:
        boundaries = cut_into_chunks(boundaries, chunk, query.device)
    if sinks is not None and sinks.ndim == 4:
        sinks = sinks.squeeze(-1).transpose(1, 2).flatten(0, 1)
    return VarlenCall(
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
        sinks=sinks,
        mask=mask,
    )


def run_in_rows(call: VarlenCall, kernel: str, rows: int) -> Tensor:
    """Compute the call and give the tokens their rows back, `[B, S, H, V]`."""
    output: Tensor = run(call, kernel).unflatten(0, (rows, -1))
    return output
