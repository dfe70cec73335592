"""Where the documents of one attention call begin and end: the sources, best first.

1. the four varlen kwargs of transformers (`cu_seq_lens_q`, ...), which a collator computed;
2. the document map (`_packed_seq_ids`), which survives a split of the batch on dimension 0;
3. the document map that transformers itself derived from restarting positions, inside the mask;
4. restarting `position_ids` that reach the attention although the mask ignored them (a cache, an
   all-ones 2-D mask, a model that builds its mask without positions).

Explicit boundaries win; guesses are used only where nothing explicit is there. None means: no packing.

Legend: `B` rows, `S` tokens in a row, `N` documents.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import assert_on_device
from ..errors import BoundaryError
from ..offsets import (
    check_cu_seqlens,
    full_stream_cu_seqlens,
    without_padded_offsets,
)
from .boundary_checks import (
    check_int32_rule,
    check_padding_mask,
    check_same_shape,
    check_same_tokens,
    describes,
)
from .mask_entry import LazyMask, MaskRecipe

VARLEN_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
DOCUMENT_MAP_KWARG = "_packed_seq_ids"


class Boundaries(NamedTuple):
    """Documents of the flattened batch, padding included (the full-stream layout).

    Attributes:
        cu_seqlens: int32 `[N+1]` on the device of the query.
        max_seqlen: tokens of the longest document.
        lengths: document lengths on the host, or None where reading them would synchronise.
        source: where they came from, for messages.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None
    source: str


def find_boundaries(
    query: Tensor, key: Tensor, attention_mask: Any, kwargs: Mapping[str, Any]
) -> Boundaries | None:
    """Find the document boundaries of one call.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, K, S', D]`.
        attention_mask: what the model hands to attention.
        kwargs: the keyword arguments that reached attention.

    Raises:
        BoundaryError: boundaries that are incomplete, or do not fit this call.
    """
    recipe = attention_mask.recipe if isinstance(attention_mask, LazyMask) else None
    explicit = all_varlen_kwargs(kwargs)
    if explicit is not None:
        return _from_varlen_kwargs(query, key, explicit, recipe)
    document_map = kwargs.get(DOCUMENT_MAP_KWARG)
    if document_map is not None:
        return _remembered(
            recipe, document_map, lambda: boundaries_from_map(query, key, document_map)
        )
    if not query.shape[2] == key.shape[2] > 1:
        return None
    if (
        recipe is not None
        and recipe.pattern is not None
        and recipe.pattern.document_map is not None
    ):
        derived = recipe.pattern.document_map
        # transformers numbers documents from 0, where a map holds 0 for padding.
        return _remembered(
            recipe, derived, lambda: _from_own_map(derived + 1, query, "restarting position_ids")
        )
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or not (recipe is not None or attention_mask is None):
        return None
    return _remembered(recipe, positions, lambda: _from_positions(query, positions, recipe))


def _remembered(recipe: MaskRecipe | None, key: Any, find: Any) -> Boundaries | None:
    """Look once per forward: the mask's recipe lives exactly as long and is shared by the layers."""
    if recipe is None:
        found: Boundaries | None = find()
        return found
    if recipe.boundaries is None or recipe.boundaries[0] is not key:
        recipe.boundaries = (key, find())
    remembered: Boundaries | None = recipe.boundaries[1]
    return remembered


def all_varlen_kwargs(kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int, int] | None:
    """Read the four varlen kwargs, or None where there is none of them.

    Raises:
        BoundaryError: some of them without the others, or offsets that are no tensors.
    """
    values = [kwargs.get(name) for name in VARLEN_KWARGS]
    if all(value is None for value in values):
        return None
    missing = [name for name, value in zip(VARLEN_KWARGS, values, strict=True) if value is None]
    if missing:
        raise BoundaryError(
            f"Attention got some of the varlen kwargs but not {', '.join(missing)}. Boundaries that are "
            f"half there would be ignored and the documents mixed. Pass all of {', '.join(VARLEN_KWARGS)}, "
            "as DataCollatorForNeatPacking does; a model whose forward names only some of them drops the rest."
        )
    cu_q, cu_k, max_q, max_k = values
    if not isinstance(cu_q, Tensor) or not isinstance(cu_k, Tensor):
        raise BoundaryError(
            f"cu_seq_lens_q and cu_seq_lens_k must be int32 tensors, got {type(cu_q).__name__} and "
            f"{type(cu_k).__name__}. Write torch.tensor(offsets, dtype=torch.int32)."
        )
    assert max_q is not None
    assert max_k is not None
    return cu_q, cu_k, max_q, max_k


def _from_varlen_kwargs(
    query: Tensor,
    key: Tensor,
    values: tuple[Tensor, Tensor, int, int],
    recipe: MaskRecipe | None,
) -> Boundaries:
    cu_q, cu_k, max_q, max_k = values

    def check() -> Boundaries:
        check_same_tokens(query, key)
        check_same_shape(cu_q, cu_k)
        same = cu_k if cu_k is not cu_q else None
        found = checked_offsets(query, cu_q, (int(max_q), int(max_k)), same_as=same)
        if recipe is not None and recipe.attention_mask is not None and found.lengths is not None:
            check_padding_mask(recipe.attention_mask, list(found.lengths))
        return found

    found = _remembered(recipe, cu_q, check)
    assert found is not None
    return found


def checked_offsets(
    query: Tensor,
    cu_seqlens: Tensor,
    longest: tuple[int, int] | None,
    *,
    same_as: Tensor | None = None,
) -> Boundaries:
    """Check offsets against the tokens of a call, on the host or, for an accelerator, on the device.

    Args:
        query: `[B, H, S, D]`.
        cu_seqlens: integer `[N+1]`; its end may be padded with repetitions of the last offset.
        longest: what the call says of the longest document, for queries and keys. None: it is counted, which
            reads the offsets.
        same_as: the offsets of the keys, where they are another tensor.

    Raises:
        BoundaryError: offsets that do not describe these tokens.
    """
    num_tokens = query.shape[0] * query.shape[2]
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise BoundaryError(
            f"cu_seq_lens_q must be a 1-D integer tensor of two or more offsets, got {list(cu_seqlens.shape)}."
        )
    check_int32_rule(num_tokens, cu_seqlens.numel() - 1, query)
    if query.device.type == "cuda" and longest is not None:
        # Reading the offsets would stall the device once a layer; the check runs there instead.
        good = describes(cu_seqlens, num_tokens, min(longest))
        if same_as is not None:
            good &= (cu_seqlens == same_as).all()
        assert_on_device(
            good,
            f"cu_seq_lens_q must rise strictly from 0 to {num_tokens} and equal cu_seq_lens_k, and no document may be "
            "longer than max_length_q",
        )
        cu = cu_seqlens.to(query.device, torch.int32)
        return Boundaries(cu, longest[0], None, "varlen kwargs")
    host = cu_seqlens.detach().cpu()
    if same_as is not None and not torch.equal(host, same_as.detach().cpu().to(host.dtype)):
        raise BoundaryError(
            f"cu_seq_lens_q {host.tolist()[:16]} and cu_seq_lens_k {same_as.tolist()[:16]} differ; in "
            "self-attention queries and keys are the same documents. Pass the same offsets twice."
        )
    host = without_padded_offsets(host)
    check_cu_seqlens(host, num_tokens=num_tokens, name="cu_seq_lens_q")
    lengths = host.diff().tolist()
    if longest is not None and max(lengths) > min(longest):
        raise BoundaryError(
            f"max_length_q={longest[0]} and max_length_k={longest[1]}, but cu_seq_lens_q has a document of "
            f"{max(lengths)} tokens: a kernel would leave its end out. Pass the longest length, a Python int."
        )
    cu = host.to(query.device, torch.int32)
    return Boundaries(cu, max(lengths), tuple(lengths), "varlen kwargs")


def check_map_shape(query: Tensor, key: Tensor, document_map: Tensor) -> None:
    """Refuse a document map that is not one of these tokens.

    Raises:
        BoundaryError: a map of another shape.
    """
    expected = (query.shape[0], query.shape[2])
    if tuple(document_map.shape) != expected or query.shape[2] != key.shape[2]:
        raise BoundaryError(
            f"The document map `{DOCUMENT_MAP_KWARG}` has shape {list(document_map.shape)}, the attention call "
            f"{expected[0]} rows of {expected[1]} queries and {key.shape[2]} keys. A map that does not fit says "
            "nothing about these tokens. Give it the shape of input_ids, and pass use_cache=False."
        )


def boundaries_from_map(query: Tensor, key: Tensor, document_map: Tensor) -> Boundaries:
    """Read the documents of a call off its document map `[B, S]`.

    Raises:
        BoundaryError: a map of another shape, or one that is not valid.
    """
    check_map_shape(query, key, document_map)
    return _from_own_map(document_map, query, f"document map ({DOCUMENT_MAP_KWARG})")


def _from_own_map(document_map: Tensor, query: Tensor, source: str) -> Boundaries:
    cu_seqlens, max_seqlen = full_stream_cu_seqlens(document_map.cpu())
    lengths = tuple(cu_seqlens.diff().tolist())
    return Boundaries(cu_seqlens.to(query.device), max_seqlen, lengths, source)


def _from_positions(
    query: Tensor, positions: Tensor, recipe: MaskRecipe | None
) -> Boundaries | None:
    """Read boundaries from positions that restart between two tokens that both may be attended to."""
    batch, row = query.shape[0], query.shape[2]
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]
    if positions.ndim != 2 or positions.shape[1] != row or positions.shape[0] not in (1, batch):
        return None
    positions = positions.expand(batch, row).cpu()
    starts = torch.zeros(batch, row, dtype=torch.int64)
    restart = positions[:, 1:] <= positions[:, :-1]
    attended = None if recipe is None else recipe.attention_mask
    if attended is not None:
        if tuple(attended.shape) != (batch, row):
            return None
        attended = attended.cpu().bool()
        restart &= attended[:, 1:] & attended[:, :-1]
    if not bool(restart.any()):
        return None
    starts[:, 1:] = restart
    document_map = starts.cumsum(-1) + 1
    if attended is not None:
        document_map = torch.where(attended, document_map, 0)
    return _from_own_map(document_map, query, "restarting position_ids")
