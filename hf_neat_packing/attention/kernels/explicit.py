"""The explicit softmax, one document at a time: what SDPA cannot say (soft capping, sinks).

Scores exist for one block of queries at a time, in the accumulation that transformers' eager
attention uses: products in the input dtype, softmax in float32 (float64 stays float64).

Legend: see `call`.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .call import VarlenCall

# Queries whose scores exist at one time.
BLOCK = 512


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document with every option of the call.

    Returns:
        `[T, H, V]` in the dtype of the value.
    """
    outputs, start = [], 0
    for q, k, v in zip(*(x.split(list(call.host_lengths())) for x in call[:3]), strict=True):
        outputs.append(_document(call, q, k, v, start))
        start += q.shape[0]
    return torch.cat(outputs)


def _document(call: VarlenCall, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    length = query.shape[0]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    mask = None if call.mask is None else call.mask(start, start + length)[0]
    outputs = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        low = 0 if call.left is None else max(0, first - call.left)
        high = length if call.right is None else min(length, last + call.right)
        scores = q[:, first:last] @ k[:, low:high].transpose(1, 2)
        scores = scores * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = _masked(call, scores, first, low)
        if mask is not None:
            block = mask[:, first:last, low:high]
            lowest = torch.finfo(scores.dtype).min
            scores = (
                scores.masked_fill(~block, lowest)
                if block.dtype == torch.bool
                else scores + block.to(scores.dtype)
            )
        sinks = call.sinks
        if sinks is not None and sinks.ndim == 2:
            sinks = sinks[start + first : start + last]
        weights = softmax_with_sinks(scores, sinks).to(v.dtype)
        outputs.append(dropout(weights, call.dropout) @ v[:, low:high])
    return torch.cat(outputs, 1).transpose(0, 1)


def _masked(call: VarlenCall, scores: Tensor, first: int, low: int) -> Tensor:
    if call.left is None and call.right is None:
        return scores
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)[:, None]
    keys = torch.arange(low, low + scores.shape[2], device=scores.device)[None, :]
    blocked = torch.zeros(scores.shape[1:], dtype=torch.bool, device=scores.device)
    if call.left is not None:
        blocked |= keys < queries - call.left
    if call.right is not None:
        blocked |= keys > queries + call.right
    return scores.masked_fill(blocked, torch.finfo(scores.dtype).min)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys and the sink, which takes its share and gives nothing.

    Args:
        scores: `[..., H, queries, keys]`.
        sinks: `[H]`, `[queries, H]` or None.

    Returns:
        Weights like `scores`, in float32 or the dtype of the scores if that is wider.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).T if sinks.ndim == 2 else sinks.to(scores.dtype)[:, None]
    sink = sink[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
