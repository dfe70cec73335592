"""One `scaled_dot_product_attention` call, confined to the documents of packed rows.

The call keeps its own meaning inside a document: causal stays causal, a dense mask stays that mask, dropout,
scale and grouped heads are what the caller said. What does not fit the rows is refused.

Legend: `B` rows, `H` query heads, `K` key heads, `S` tokens in a row, `D` head dim, `V` value head dim,
`T` real tokens.
"""

import importlib.util
import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._compat import torch_varlen_attention
from ...attention.kernels import KERNELS, DocumentMask, VarlenCall, run
from ...errors import ContractError, MissingDependencyError, UnsupportedAttentionError
from . import transformer_engine
from .packed_rows import PackedRows

BACKENDS = ("auto", "flash", "te", "torch_varlen", "sdpa")

_numbers = itertools.count(1)

_SYNONYMS = {
    "": "auto",
    "default": "auto",
    "flash_attn": "flash",
    "flash_attention": "flash",
    "flash_attention_2": "flash",
    "fa2": "flash",
    "transformer_engine": "te",
    "varlen": "torch_varlen",
    "torch_sdpa": "sdpa",
    "dense": "sdpa",
}


@dataclass(frozen=True, eq=False)
class Armed:
    """What rides with one packed forward: its rows and how their attention is computed.

    Attributes:
        rows: the documents, or None for a forward without boundaries.
        backend: a name of `BACKENDS`.
        bidirectional: whether a call with neither mask nor `is_causal` is this model's attention.
        owner: number of the attachment whose forward it is.
        number: unlike that of any other forward of the process.
    """

    rows: PackedRows | None
    backend: str = "auto"
    bidirectional: bool = False
    owner: int = -1
    number: int = field(default_factory=lambda: next(_numbers), init=False)


def resolve_backend(name: str | None) -> str:
    """Return the plain name of a backend that can run here.

    Args:
        name: a name of `BACKENDS` or a synonym, in any case and with `-` for `_`; None is `auto`.

    Raises:
        ContractError: an unknown name.
        MissingDependencyError: a backend whose package is not installed.
    """
    plain = "" if name is None else str(name).strip().lower().replace("-", "_")
    plain = _SYNONYMS.get(plain, plain)
    if plain not in BACKENDS:
        raise ContractError(
            f"There is no packed attention backend {name!r}, and another one is not taken in its place. Known: "
            f"{', '.join(BACKENDS)}."
        )
    packages = {"flash": "flash_attn", "te": "transformer_engine"}
    if plain in packages and importlib.util.find_spec(packages[plain]) is None:
        raise MissingDependencyError(
            f"The packed attention backend {plain!r} needs the package {packages[plain]}, which is not installed. It "
            'is not replaced by another. Install it, or write "sdpa" (any device and dtype) or "auto".'
        )
    if plain == "torch_varlen" and torch_varlen_attention() is None:
        raise MissingDependencyError(
            f"The packed attention backend 'torch_varlen' needs torch.nn.attention.varlen, which torch "
            f'{torch.__version__} lacks. Install torch 2.10 or later, or write "sdpa" or "auto".'
        )
    return plain


def packed_attention(
    armed: Armed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what the call says, inside each document.

    Args:
        armed: the rows and the backend.
        query: `[B, H, S, D]`.
        key: `[B, K, S, D]`.
        value: `[B, K, S, V]`.
        attn_mask: bool (True = may attend) or additive, broadcastable to `[B, H, S, S]`, or None.
        dropout_p: probability of zeroing an attention weight.
        is_causal: whether a token sees only earlier ones.
        scale: factor on the scores; None means `D ** -0.5`.
        enable_gqa: whether several query heads share a key head.

    Returns:
        `[B, H, S, V]`; zeros at padding.

    Raises:
        UnsupportedAttentionError: a call that does not fit the rows, or that the backend cannot compute.
    """
    rows = armed.rows
    assert rows is not None
    _require_fit(armed, rows, query, key, value)
    if not is_causal and attn_mask is None and not armed.bidirectional and rows.shape[1] > 1:
        raise UnsupportedAttentionError(
            f"An attention call over packed rows {list(rows.shape)} has neither a mask nor is_causal=True, so tokens "
            "would see what follows them. In a causal model this is somebody else's attention, such as a vision "
            "tower's. Leave that module out with `modules=[...]`, or say bidirectional=True for an encoder."
        )
    if is_causal and attn_mask is not None:
        raise UnsupportedAttentionError(
            "scaled_dot_product_attention got attn_mask and is_causal=True; it takes one of the two."
        )
    if query.shape[1] != key.shape[1] and not enable_gqa and key.shape[1] != 1:
        raise UnsupportedAttentionError(
            f"{query.shape[1]} query heads over {key.shape[1]} key heads need enable_gqa=True."
        )
    indices, cu_seqlens = rows.on(query.device)
    query, key, value = (
        _gather(x.transpose(1, 2).flatten(0, 1), rows, indices) for x in (query, key, value)
    )
    if not rows.lengths:
        # Sums of nothing: zeros that stay attached, so that every rank has the same graph.
        attached = query.sum() + key.sum() + value.sum()
        output = value.new_empty(0, query.shape[1], value.shape[-1]) + attached
    else:
        call = VarlenCall(
            query=query,
            key=key,
            value=value,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(rows.lengths),
            lengths=rows.lengths,
            right=0 if is_causal else None,
            scale=scale,
            dropout=dropout_p,
            mask=None if attn_mask is None else _document_mask(attn_mask, rows),
        )
        output = _run(call, armed.backend)
    laid: Tensor = _scatter(output, rows, indices).unflatten(0, rows.shape)
    return laid.transpose(1, 2)


def _require_fit(armed: Armed, rows: PackedRows, query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if all(len(shape) == 4 and (shape[0], shape[2]) == rows.shape for shape in shapes):
        return
    raise UnsupportedAttentionError(
        f"The packed rows have shape {list(rows.shape)}, but attention got query {list(shapes[0])}, key "
        f"{list(shapes[1])}, value {list(shapes[2])} instead of [batch, heads, sequence, dim] over these rows: "
        "cross-attention, a cache that already holds tokens, another tower, or rows that were split or padded "
        "after the map. Plain attention would mix the documents. Pass use_cache=False, a map of the shape of "
        "the tokens, and `modules=[...]` without modules that see other tokens."
    )


def _gather(stream: Tensor, rows: PackedRows, indices: Tensor) -> Tensor:
    if rows.is_full:
        return stream
    if (stretch := rows.stretch) is not None:
        return stream[stretch[0] : stretch[1]]
    return stream.index_select(0, indices)


def _scatter(output: Tensor, rows: PackedRows, indices: Tensor) -> Tensor:
    """Lay the real tokens back between zeros."""
    if rows.is_full:
        return output
    slots = rows.shape[0] * rows.shape[1]
    if (stretch := rows.stretch) is not None:
        return pad(output, (0, 0, 0, 0, stretch[0], slots - stretch[1]))
    return output.new_zeros(slots, *output.shape[1:]).index_copy(0, indices, output)


def _document_mask(mask: Tensor, rows: PackedRows) -> DocumentMask:
    """Cut the caller's mask into the blocks of the documents; what lies outside is never read."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    mask = mask.expand(-1, -1, rows.shape[1], rows.shape[1])

    def block(start: int, stop: int) -> Tensor:
        row, where = rows.block(start, stop)
        one = mask[row : row + 1] if mask.shape[0] > 1 else mask
        if isinstance(where, Tensor):
            where = where.to(mask.device)
        return one[:, :, where][:, :, :, where]

    return block


def _run(call: VarlenCall, backend: str) -> Tensor:
    if backend == "auto":
        return run(call)
    compute, why_not = (
        (transformer_engine.attention, transformer_engine.why_not)
        if backend == "te"
        else KERNELS[backend]
    )
    reason = why_not(call)
    if reason is not None:
        raise UnsupportedAttentionError(
            f"The packed attention backend {backend!r} was asked for by name but cannot compute this call: {reason}. "
            'It is not replaced. Write "auto" for the best backend that can, or "sdpa" for any device and dtype.'
        )
    return compute(call)
