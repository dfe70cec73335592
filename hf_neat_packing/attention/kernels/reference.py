"""The oracle: dense masked attention in float64, written from the definition.

It shares no code with the kernels and no shortcut: one `[T, T]` mask from the document of each token,
one softmax. Slow and large on purpose; tests compare every kernel with it.
"""

import torch
from torch import Tensor

from .call import VarlenCall


def dense_mask(call: VarlenCall) -> Tensor:
    """Return bool `[T, T]`: True where query (row) and key (column) are in one document and one window."""
    lengths = torch.tensor(call.host_lengths(), device=call.query.device)
    document = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=lengths.device), lengths
    )
    token = torch.arange(document.numel(), device=lengths.device)
    distance = token[None, :] - token[:, None]
    allowed = document[None, :] == document[:, None]
    if call.left is not None:
        allowed &= distance >= -call.left
    if call.right is not None:
        allowed &= distance <= call.right
    return allowed


def attention(call: VarlenCall) -> Tensor:
    """Compute `softmax(scale * q k^T) v` inside every document, in float64.

    Returns:
        float64 `[T, H, V]`. Dropout is not applied: the oracle is the expectation.

    Source: Vaswani et al. 2017, equation 1; sinks as in gpt-oss (a score without a value); soft
    capping as in Gemma 2.
    """
    query, key, value = (x.to(torch.float64).transpose(0, 1) for x in call[:3])
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.transpose(1, 2) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~dense_mask(call), -torch.inf)
    if call.mask is not None:
        scores = scores + _document_masks(call, scores)
    if call.sinks is not None:
        sink = call.sinks.to(torch.float64)
        sink = (
            sink.expand(scores.shape[1], -1).T[:, :, None] if sink.ndim == 1 else sink.T[:, :, None]
        )
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(0, 1)


def _document_masks(call: VarlenCall, scores: Tensor) -> Tensor:
    assert call.mask is not None
    additive = torch.zeros_like(scores)
    start = 0
    for length in call.host_lengths():
        block = call.mask(start, start + length)[0].to(scores.device)
        if block.dtype == torch.bool:
            block = torch.zeros_like(block, dtype=scores.dtype).masked_fill(~block, -torch.inf)
        additive[:, start : start + length, start : start + length] += block
        start += length
    return additive
