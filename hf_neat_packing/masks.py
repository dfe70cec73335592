"""4-D masks from the document map, one per layer type, in the form that the backend adds or reads.

A mask is filled document by document, so making it costs the squares of the documents; holding it
costs the square of the row. Where a backend takes offsets, no mask is made at all.

Legend: `B` rows, `S` tokens in a row, `L` tokens of a document.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention.mask_entry import additive
from .contract import LayerMask, MaskLayout, PackingCapabilities
from .documents import binary_to_map
from .offsets import full_stream_cu_seqlens

# Above this row length a 4-D mask is told about: 64 MiB for each layer type at this length, in bool.
WARN_ABOVE = 8192


def block_mask(
    document_map: Tensor, pattern: LayerMask | None = None, *, is_causal: bool = True
) -> Tensor:
    """Build the boolean mask of a packed batch.

    Args:
        document_map: integer `[B, S]`, 1-based in each row, 0 = padding.
        pattern: what layers of this type put over their documents; default: nothing.
        is_causal: whether a token sees earlier tokens only.

    Returns:
        bool `[B, 1, S, S]` on the map's device, True = may attend. A padding token sees itself and
        nothing else, so that no row of a softmax is empty; no document sees padding.

    Raises:
        BoundaryError: the map is invalid.

    Example:
        >>> block_mask(torch.tensor([[1, 1, 2]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    document_map = binary_to_map(document_map)
    batch, row = document_map.shape
    mask = torch.zeros(batch, 1, row, row, dtype=torch.bool, device=document_map.device)
    offsets = full_stream_cu_seqlens(document_map)[0].tolist()
    ids = document_map.reshape(-1)[offsets[:-1]].tolist()
    for start, stop, document in zip(offsets, offsets[1:], ids, strict=False):
        index, first = divmod(start, row)
        block = mask[index, 0, first : first + stop - start, first : first + stop - start]
        if document == 0:
            block.fill_diagonal_(True)
        else:
            _fill(block, pattern or LayerMask(), is_causal=is_causal)
    return mask


def _fill(block: Tensor, pattern: LayerMask, *, is_causal: bool) -> None:
    """Write the pattern of one document, bool `[L, L]` of zeros, in place."""
    size = pattern.size
    if pattern.kind == "chunked" and size is not None:
        for first in range(0, block.shape[0], size):
            block[first : first + size, first : first + size] = True
    else:
        block.fill_(True)
    if pattern.kind == "sliding" and size is not None:
        # A causal window counts the query itself; a bidirectional one is `size` tokens on each side.
        block.triu_(1 - size if is_causal else -size)
        if not is_causal:
            block.tril_(size)
    if is_causal:
        block.tril_()


class _SameDocument:
    """A mask function of flex attention that travels between processes."""

    def __init__(self, document_map: Tensor, pattern: LayerMask, *, is_causal: bool) -> None:
        self.document_map, self.pattern, self.is_causal = document_map, pattern, is_causal
        first = torch.zeros_like(document_map)
        first[:, 1:] = document_map[:, 1:] != document_map[:, :-1]
        index = torch.arange(document_map.shape[1], device=document_map.device).expand_as(first)
        self.start = torch.where(first.bool(), index, 0).cummax(-1).values

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        """Say whether a query may see a key."""
        document = self.document_map[batch, query]
        allowed = (document == self.document_map[batch, key]) & ((document != 0) | (query == key))
        if self.is_causal:
            allowed = allowed & (key <= query)
        size = self.pattern.size
        if self.pattern.kind == "sliding" and size is not None:
            reach = size - 1 if self.is_causal else size
            allowed = allowed & (query - key <= reach) & (key - query <= reach)
        if self.pattern.kind == "chunked" and size is not None:
            start = self.start[batch, query]
            allowed = allowed & ((query - start) // size == (key - start) // size)
        return allowed


def flex_block_mask(
    document_map: Tensor, pattern: LayerMask | None = None, *, is_causal: bool = True
) -> Any:
    """Build the compressed mask of `flex_attention`.

    Args:
        document_map: as for `block_mask`.
        pattern: as for `block_mask`.
        is_causal: as for `block_mask`.

    Returns:
        `torch.nn.attention.flex_attention.BlockMask` for `[B, 1, S, S]`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    document_map = binary_to_map(document_map)
    full_stream_cu_seqlens(document_map)  # refuses an invalid map
    allowed = _SameDocument(document_map, pattern or LayerMask(), is_causal=is_causal)
    batch, row = document_map.shape
    return create_block_mask(allowed, batch, None, row, row, device=str(document_map.device))


def masks_for(document_map: Tensor, capabilities: PackingCapabilities) -> Any:
    """Build what a model with a 4-D layout takes as `attention_mask`.

    Args:
        document_map: integer `[B, S]`.
        capabilities: layout, patterns of the layers, and how the model takes several masks.

    Returns:
        One mask, or a dict from layer type to mask where the model takes one (None for layers that
        attend to nothing).
    """
    build = _builder(capabilities.layout, capabilities.mask_dtype)
    if document_map.shape[1] > WARN_ABOVE:
        _warn(document_map, capabilities)
    attending = [mask for mask in capabilities.layer_masks if mask.kind != "recurrent"]
    if capabilities.mask_delivery != "dict":
        pattern = attending[0] if attending else LayerMask()
        return build(document_map, pattern, capabilities.is_causal)
    built: dict[tuple[str, int | None], Any] = {}
    masks: dict[str, Any] = {}
    for layer in capabilities.layer_masks:
        if layer.kind == "recurrent":
            masks[layer.layer_type] = None
            continue
        if (layer.kind, layer.size) not in built:
            built[layer.kind, layer.size] = build(document_map, layer, capabilities.is_causal)
        masks[layer.layer_type] = built[layer.kind, layer.size]
    return masks


def _builder(
    layout: MaskLayout | None, dtype: torch.dtype
) -> Callable[[Tensor, LayerMask, bool], Any]:
    if layout == "bool_4d":
        return lambda ids, pattern, causal: block_mask(ids, pattern, is_causal=causal)
    if layout == "additive_4d":
        return lambda ids, pattern, causal: additive(
            block_mask(ids, pattern, is_causal=causal), dtype
        )
    assert layout == "block_mask", layout
    return lambda ids, pattern, causal: flex_block_mask(ids, pattern, is_causal=causal)


def _warn(document_map: Tensor, capabilities: PackingCapabilities) -> None:
    item = capabilities.mask_dtype.itemsize if capabilities.layout == "additive_4d" else 1
    kinds = {(mask.kind, mask.size) for mask in capabilities.layer_masks}
    masks = max(1, len(kinds)) if capabilities.mask_delivery == "dict" else 1
    size = document_map.shape[0] * document_map.shape[1] ** 2 * item * masks
    warnings.warn(
        f"Rows of {document_map.shape[1]} tokens under {capabilities.attention_key!r} need a mask of {size:,} bytes "
        f'per batch. attn_implementation="neat_varlen" computes the same attention without it.',
        stacklevel=2,
    )
