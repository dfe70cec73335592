"""What can be done about a module that mixes documents or misplaces them: removable hooks, cheapest first.

A repair is tried on the module that was found (`probe`) and kept only where the module then does what it
does for each document alone. None of them changes a module, a weight or a function.

Legend: `B` rows, `S` tokens in a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import VARLEN_KEYS
from ..hooks.recurrent import PerDocument
from ..hooks.regroup import equal_lengths, near_lengths
from ..hooks.running import RowLayout, Scope
from ..wrappers import forward_parameters, takes_any_keyword
from .base import Arguments, Removable, Repair
from .mask_repairs import MarkOtherDocuments, MaskOtherDocuments, is_square, mask_argument


class HandBoundaries(Repair):
    """Hand the boundaries to an attention module that the model calls without them."""

    name = "boundaries handed to attention"
    cost = "nothing"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put a pre-hook on a module that passes keyword arguments on to its attention function."""
        return [module.register_forward_pre_hook(self._hand, with_kwargs=True)]

    def _hand(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        layout = self.layout(kwargs)
        if layout is None:
            return None
        if layout.one_document_a_row or kwargs.get(VARLEN_KEYS[0]) is not None:
            return None
        return args, kwargs | layout.varlen_kwargs(_device(args, kwargs))


class RestartPositions(Repair):
    """Let the positions that a module counts along the row restart in each document."""

    name = "positions restarted per document"
    cost = "one gather per forward"
    for_whole_class = False

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put a hook on a module whose output `[.., S, ..]` depends on the place in the row only."""
        return [module.register_forward_hook(self._restart, with_kwargs=True)]

    def _restart(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        layout = self.layout(kwargs)
        if layout is None or layout.one_document_a_row:
            return None
        return _restarted(output, layout)


def _restarted(output: Any, layout: RowLayout) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output)(_restarted(part, layout) for part in output)
    if not isinstance(output, Tensor):
        return output
    rows, length = layout.rows, layout.row_length
    offsets = layout.offsets_in_document(output.device)
    by_row = output.ndim >= 2 and output.shape[1] == length and output.shape[0] in (1, rows)
    if by_row:
        wide = output.expand(rows, *output.shape[1:])
        return wide[torch.arange(rows, device=output.device)[:, None], offsets]
    if output.ndim >= 1 and output.shape[0] == length:
        alike = rows == 1 or bool((offsets == offsets[:1]).all())
        return output[offsets[0]] if alike else output[offsets]
    return output


class OncePerDocument(Repair):
    """Run a recurrent, convolutional or other causal layer once per document."""

    name = "run once per document"
    cost = "padding up to 12 % of the row's tokens in this layer, and one call per group of near lengths"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks of `PerDocument` on a module."""
        return [*PerDocument(self.scope, groups=near_lengths).attach(module)]


class OncePerLength(OncePerDocument):
    """Run a layer once per distinct document length, for layers that padding would disturb."""

    name = "run once per document length, unpadded"
    cost = "one call of this layer per distinct document length"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks of `PerDocument` on a module."""
        return [*PerDocument(self.scope, groups=equal_lengths).attach(module)]


class AttentionPerDocument(OncePerDocument):
    """Run an attention layer once per document, with the document's own part of the mask."""

    name = "run once per document, with its part of the mask"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks of `PerDocument` on a module."""
        return [*PerDocument(self.scope, groups=near_lengths, masks="cut").attach(module)]


def candidates(
    module: nn.Module,
    arguments: Arguments,
    *,
    reads_offsets: bool,
    place_only: bool,
) -> list[Callable[[Scope], Repair]]:
    """List what may help a module, cheapest first.

    Args:
        module: the module that was found.
        arguments: what it was called with.
        reads_offsets: whether the model's attention takes boundaries as offsets.
        place_only: whether its output depends on the place in the row and on no token.
    """
    args, kwargs = arguments
    parameters = forward_parameters(module) or {}
    found: list[Callable[[Scope], Repair]] = []
    if place_only:
        found.append(RestartPositions)
    if reads_offsets and takes_any_keyword(parameters) and kwargs.get(VARLEN_KEYS[0]) is None:
        found.append(HandBoundaries)
    mask = mask_argument(module, args, kwargs)
    attends = any(is_square(value) for value in (*args, *kwargs.values())) or isinstance(
        getattr(module, "is_causal", None), bool
    )
    if mask is not None and attends:
        found += [MaskOtherDocuments, MarkOtherDocuments, AttentionPerDocument]
    return [*found, OncePerDocument, OncePerLength]


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device
