"""Mask functions that transformers composed, read back from their closures."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .transformers_names import bidirectional_mask_function, causal_mask_function

_MASKING_MODULE = causal_mask_function.__module__


class MaskPattern(NamedTuple):
    """What a transformers mask function lets a query see, in steps from its own position.

    Attributes:
        left: keys before the query (None: all of them).
        right: keys after the query (None: all of them; 0: causal).
        chunk: tokens of an attention chunk counted from the document's start, or None.
        document_map: int `[B, S]` that transformers derived from restarting positions, or None.
    """

    left: int | None
    right: int | None
    chunk: int | None
    document_map: torch.Tensor | None


def mask_pattern(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """Read a mask function that transformers composed, or return None for anything else.

    Custom overlays (`or_masks`, block-wise image groups, a user's own function) are not read:
    whoever gets None must evaluate the function itself. Drop when mask functions describe themselves.
    """
    left = right = chunk = document_map = None
    for name, cells in _leaves(mask_function):
        if name == "causal":
            right = 0
        elif name == "sliding_window_overlay":
            left = _smaller(left, cells["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            left = _smaller(left, cells["sliding_window"])
            right = _smaller(right, cells["sliding_window"])
        elif name == "chunked_overlay":
            chunk = cells["chunk_size"]
        elif name == "packed_sequence_mask_function":
            document_map = cells["packed_sequence_mask"]
        elif name != "bidirectional":
            return None
    return MaskPattern(left, right, chunk, document_map)


def chunks_follow_positions() -> bool:
    """Whether a mask built for packed rows counts chunks from each document's start (drop with 5.6)."""
    return hasattr(sys.modules[_MASKING_MODULE], "remap_positions_for_packed_sequence")


def tables_by_row(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """Read tables of blocks at the row's own indices, as they are written.

    For packed rows transformers hands restarting positions to everything inside a mask function. Patterns want
    them; a table of image blocks that came as `or_mask_function` is then read at another document's places (drop
    when transformers remaps patterns only).
    """
    return _remapped(mask_function, None)


def _remapped(function: Callable[..., Any], positions: torch.Tensor | None) -> Callable[..., Any]:
    """Rebuild a composed function with the remapping pushed down to everything but tables."""
    name, cells = "", dict[str, Any]()
    if inspect.isfunction(function) and function.__module__ == _MASKING_MODULE:
        name = function.__qualname__.split(".")[0]
        cells = dict(inspect.getclosurevars(function).nonlocals)
    if name == "remap_positions_for_packed_sequence":
        return _remapped(cells["mask_function"], cells["position_ids"])
    if name in ("and_masks", "or_masks"):
        parts = [_remapped(part, positions) for part in cells["mask_functions"]]
        join = torch.logical_and if name == "and_masks" else torch.logical_or

        def joined(*index: Any) -> Any:
            return functools.reduce(join, [part(*index) for part in parts])

        return joined
    if positions is None or name == "blockwise_overlay":
        return function

    def remapped(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return function(batch, head, positions[batch, query], positions[batch, key])

    return remapped


def _smaller(old: int | None, new: int) -> int:
    return new if old is None else min(old, new)


def _leaves(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk the parts of an intersection of transformers' mask functions."""
    if function is causal_mask_function:
        yield "causal", {}
    elif function is bidirectional_mask_function:
        yield "bidirectional", {}
    elif inspect.isfunction(function) and function.__module__ == _MASKING_MODULE:
        name = function.__qualname__.split(".")[0]
        cells = dict(inspect.getclosurevars(function).nonlocals)
        if name == "and_masks":
            for part in cells["mask_functions"]:
                yield from _leaves(part)
        elif name == "remap_positions_for_packed_sequence":
            # Positions count from the document's start, which is how every pattern is meant here.
            yield from _leaves(cells["mask_function"])
        else:
            yield name, cells
    else:
        yield "unknown", {}
