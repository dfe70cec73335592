"""Per-document SDPA: exact and sub-quadratic on every device and in every dtype, with torch alone.

Each document is a call of `scaled_dot_product_attention` over its own tokens; short documents share
calls (see `buckets`), and a window much shorter than a document is walked in blocks, so no tensor is
larger than the square of one document, or of two windows.

Legend: see `call`. `n` documents in a bucket, `W` its width.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .buckets import Regroup, share_calls
from .call import VarlenCall

# A window is walked in blocks when the document is this many windows long: below, one masked call
# over the whole document is cheaper than the copies.
BLOCKED_FROM_WINDOWS = 3


class _Gather(torch.autograd.Function):
    """Copy rows so that each source row goes to exactly one real slot; the backward is a gather too.

    `index_select`'s own backward scatters with `index_add`, which is many times slower on CPU.
    """

    @staticmethod
    def forward(ctx, rows, source, slot):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot)
        return rows.index_select(0, source)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot,) = ctx.saved_tensors
        return grad.index_select(0, slot), None, None


class _Scatter(torch.autograd.Function):
    """The inverse of `_Gather`: take the real slots, and give padding slots no gradient."""

    @staticmethod
    def forward(ctx, slots, slot):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, slot)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slot, grad), None


def attention(call: VarlenCall) -> Tensor:
    """Compute attention inside every document.

    Returns:
        `[T, H, V]` in the dtype of the value.
    """
    assert call.softcap is None, "soft capping goes to the explicit kernel"
    assert call.sinks is None, "sinks go to the explicit kernel"
    lengths = call.host_lengths()
    if call.mask is not None:
        return _masked_documents(call, lengths)
    if len(lengths) == 1:
        return _bucket(call, *call[:3], num_documents=1, width=lengths[0], real=None)
    plan = share_calls(lengths, call.query.shape[1])
    if not plan.alone:
        return _shared_calls(call, call[:3], plan, lengths)
    sizes = [tokens for tokens, _ in plan.stretches]
    pieces = list(zip(*(x.split(sizes) for x in call[:3]), strict=True))
    shared = [index for index, (_, document) in enumerate(plan.stretches) if document is None]
    outputs: list[Tensor | None] = [None] * len(pieces)
    for index, (tokens, document) in enumerate(plan.stretches):
        if document is not None:
            outputs[index] = _bucket(call, *pieces[index], num_documents=1, width=tokens, real=None)
    if shared:
        streams = tuple(torch.cat([pieces[index][x] for index in shared]) for x in range(3))
        merged = _shared_calls(call, streams, plan, lengths)
        for index, output in zip(shared, merged.split([sizes[i] for i in shared]), strict=True):
            outputs[index] = output
    return torch.cat([output for output in outputs if output is not None])


def _shared_calls(
    call: VarlenCall, streams: tuple[Tensor, ...], plan: Regroup, lengths: tuple[int, ...]
) -> Tensor:
    """Run the buckets over the short stream and lay their outputs back into stream order."""
    device = call.query.device
    source, slot = plan.source.to(device), plan.slot.to(device)
    if not plan.in_order:
        streams = tuple(_Gather.apply(x, source, slot) for x in streams)  # type: ignore[no-untyped-call]
    sizes = [len(bucket.documents) * bucket.width for bucket in plan.buckets]
    outputs = []
    for bucket, *tensors in zip(plan.buckets, *(x.split(sizes) for x in streams), strict=True):
        real = torch.tensor([lengths[n] for n in bucket.documents], device=device)
        num_documents = len(bucket.documents)
        outputs.append(
            _bucket(call, *tensors, num_documents=num_documents, width=bucket.width, real=real)
        )
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if plan.in_order:
        return output
    return _Scatter.apply(output, slot)  # type: ignore[no-untyped-call, no-any-return]


def _bucket(
    call: VarlenCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_documents: int,
    width: int,
    real: Tensor | None,
) -> Tensor:
    """Attend inside `n` documents of one width, `[n*W, heads, dim]` in and out.

    `real` holds their lengths where some are padded on the right. Causal attention never looks
    there; only a query that sees what follows it needs the padding masked.
    """
    left, right = _inside(call.left, width), _inside(call.right, width)
    if real is not None and right != 0 and bool((real < width).any()):
        keys = torch.arange(width, device=query.device) < real[:, None]
        mask = keys[:, None, None, :] & _band(left, right, width, query.device)
    elif left is None and right in (None, 0):
        mask = None
    elif (
        num_documents == 1
        and right is not None
        and left is not None
        and (width >= BLOCKED_FROM_WINDOWS * (left + right + 1))
    ):
        return _blocked(call, query, key, value, left=left, right=right)
    else:
        mask = _band(left, right, width, query.device)
    q, k, v = (x.unflatten(0, (num_documents, width)).transpose(1, 2) for x in (query, key, value))
    out = _grouped_sdpa(call, q, k, v, mask, is_causal=mask is None and right == 0 and width > 1)
    return out.transpose(1, 2).flatten(0, 1)


def _inside(reach: int | None, width: int) -> int | None:
    """A window that reaches past the document is no window."""
    return None if reach is None or (reach > 0 and reach >= width - 1) else reach


def _band(left: int | None, right: int | None, width: int, device: torch.device) -> Tensor:
    """Return bool `[W, W]`: True where the key is at most `left` before and `right` after the query."""
    band = torch.ones(width, width, dtype=torch.bool, device=device)
    if right is not None:
        band = band.tril_(right)
    return band if left is None else band.triu_(-left)


def _grouped_sdpa(
    call: VarlenCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """SDPA with fewer key heads than query heads, without copying the keys where one row allows it."""
    groups = q.shape[1] // k.shape[1]
    rows = q.shape[0]
    if groups > 1 and rows == 1 and mask is None:
        # Heads of one group become a batch entry: the keys are a broadcast view.
        q = q.squeeze(0).unflatten(0, (k.shape[1], groups))
        k, v = (x.transpose(0, 1).expand(-1, groups, -1, -1) for x in (k, v))
    elif groups > 1:
        k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    out = sdpa(
        q, k, v, attn_mask=mask, dropout_p=call.dropout, is_causal=is_causal, scale=call.scale
    )
    return out.flatten(0, 1)[None] if groups > 1 and rows == 1 and mask is None else out


def _blocked(
    call: VarlenCall, query: Tensor, key: Tensor, value: Tensor, *, left: int, right: int
) -> Tensor:
    """Walk a window over one long document in blocks: `L * (2 window)` scores instead of `L * L`."""
    length, block = query.shape[0], max(left + right + 1, 64)
    blocks = -(-length // block)
    tail = blocks * block - length
    span = left + block + right
    q = pad(query, (0, 0, 0, 0, 0, tail)).unflatten(0, (blocks, block)).transpose(1, 2)
    # unfold puts the span last: [blocks, heads, dim, span]
    k, v = (
        pad(x, (0, 0, 0, 0, left, tail + right)).unfold(0, span, block).transpose(2, 3)
        for x in (key, value)
    )
    queries = torch.arange(block, device=query.device)[:, None]
    keys = torch.arange(span, device=query.device)[None, :]
    window = (keys >= queries) & (keys <= queries + left + right)
    absolute = torch.arange(blocks, device=query.device)[:, None, None] * block + keys - left
    inside = (absolute >= 0) & (absolute < length)
    # A padding query sees its own slot, so that no row of the softmax is empty.
    mask = (window & inside) | ((keys == queries + left) & ~inside)
    out = _grouped_sdpa(call, q, k, v, mask[:, None], is_causal=False)
    return out.transpose(1, 2).flatten(0, 1)[:length]


def _masked_documents(call: VarlenCall, lengths: tuple[int, ...]) -> Tensor:
    """Attend inside each document under a mask of its own."""
    assert call.mask is not None
    outputs, start = [], 0
    for q, k, v in zip(*(x.split(list(lengths)) for x in call[:3]), strict=True):
        mask = call.mask(start, start + q.shape[0])
        if mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        outputs.append(_grouped_sdpa(call, q, k, v, mask, is_causal=False)[0].transpose(0, 1))
        start += q.shape[2]
    return torch.cat(outputs)
