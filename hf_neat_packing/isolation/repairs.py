"""What can be done about a module that mixes documents or misplaces them: removable hooks, cheapest first.

A repair is tried on the module that was found (`probe`) and kept only where the module then does what it
does for each document alone. None of them changes a module, a weight or a function.

Legend: `B` rows, `S` tokens in a row.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._compat import attention_key
from ..attention.mask_entry import LazyMask
from ..contract import VARLEN_KEYS
from ..errors import UnsupportedModelError
from ..hooks.recurrent import PerDocument
from ..hooks.regroup import equal_lengths, near_lengths
from ..hooks.running import RowLayout, read_layout, running
from ..wrappers import forward_parameters, takes_any_keyword

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Removable(Protocol):
    """Something that comes off again."""

    def remove(self) -> None:
        """Take it off; a second call does nothing."""


class Repair:
    """One way of keeping documents apart in a module.

    Attributes:
        name: what it is called in reports.
        cost: what it costs, in words.
    """

    name = ""
    cost = ""

    def __init__(self, scope: object) -> None:
        self.scope = scope

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks on a module and return their handles."""
        raise AssertionError(f"{type(self).__name__} does not say what it attaches")

    def layout(self, kwargs: dict[str, Any]) -> RowLayout | None:
        """Return the documents of the running forward, None where it is not packed."""
        frame = running(self.scope)
        return read_layout(kwargs, None) if frame is None else frame.layout


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


class MaskOtherDocuments(Repair):
    """Hide other documents in the mask that an attention module gets, and write it as scores to add."""

    name = "mask of other documents added in attention"
    cost = "a mask of the squared row length per forward"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put a pre-hook on a module that takes a mask."""
        return [module.register_forward_pre_hook(self._mask, with_kwargs=True)]

    def _mask(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        found = _mask_argument(module, args, kwargs)
        if found is None:
            return None
        name, place, mask = found
        layout = self.layout(kwargs)
        if (layout is None or layout.one_document_a_row) and not isinstance(mask, LazyMask):
            return None
        hidden = _first_float(args, kwargs)
        added = self._additive(module, mask, layout, hidden)
        if place is None:
            return args, kwargs | {name: added}
        return (*args[:place], added, *args[place + 1 :]), kwargs

    def _additive(
        self, module: nn.Module, mask: Any, layout: RowLayout | None, hidden: Tensor
    ) -> Tensor:
        if isinstance(mask, LazyMask):
            mask = mask.recipe.dense()
        if layout is not None and not layout.one_document_a_row:
            same = layout.same_document(hidden.device)
            if mask is None:
                causal = getattr(module, "is_causal", True)
                mask = same.tril() if causal else same
            elif mask.dtype == torch.bool:
                mask = mask & same
            else:
                return mask.masked_fill(~same, torch.finfo(mask.dtype).min)  # type: ignore[no-any-return]
        if mask.dtype != torch.bool:
            return mask  # type: ignore[no-any-return]
        zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
        return zeros.masked_fill(~mask, torch.finfo(hidden.dtype).min)


class MarkOtherDocuments(MaskOtherDocuments):
    """Hide other documents in a mask that says True for what is hidden."""

    name = "mask of other documents, True where hidden, in attention"

    def _additive(
        self, module: nn.Module, mask: Any, layout: RowLayout | None, hidden: Tensor
    ) -> Tensor:
        return super()._additive(module, mask, layout, hidden) != 0


class OwnAttention(MaskOtherDocuments):
    """Run an attention module by the model's own eager attention, where its key does not do what it asks for."""

    name = "runs by the model's own eager attention, with a mask of other documents"

    def attach(self, module: nn.Module) -> list[Removable]:
        """Give a module a config of its own, and put the pre-hook of the mask on it."""
        return [*super().attach(module), _EagerConfig(module)]


class _EagerConfig:
    """A module's config, and those of its parts, exchanged for copies that say `eager`."""

    def __init__(self, module: nn.Module) -> None:
        self._before: list[tuple[Any, Any]] = [
            (part, vars(part)["config"])
            for part in module.modules()
            if attention_key(vars(part).get("config")) is not None
        ]
        for part, config in self._before:
            own = copy.deepcopy(config)
            own.update({"_attn_implementation": "eager"})
            part.config = own

    def remove(self) -> None:
        """Put the configs back."""
        for part, config in self._before:
            part.config = config
        self._before.clear()


def _mask_argument(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, int | None, Any] | None:
    """Find the mask among the arguments: `(name, place or None, value)`."""
    names = list(forward_parameters(module) or {})
    for place, value in enumerate(args):
        name = names[place] if place < len(names) else ""
        if isinstance(value, LazyMask) or (_is_mask_name(name) and _is_square(value)):
            return name, place, value
    for name, value in kwargs.items():
        if isinstance(value, LazyMask) or (_is_mask_name(name) and _is_square(value)):
            return name, None, value
    for place, name in enumerate(names):
        if _is_mask_name(name):
            return name, place if place < len(args) else None, None
    return None


def _is_mask_name(name: str) -> bool:
    return "attention_mask" in name or name in ("mask", "attn_mask")


def _is_square(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == value.shape[-2]


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
) -> list[Callable[[object], Repair]]:
    """List what may help a module, cheapest first.

    Args:
        module: the module that was found.
        arguments: what it was called with.
        reads_offsets: whether the model's attention takes boundaries as offsets.
        place_only: whether its output depends on the place in the row and on no token.
    """
    args, kwargs = arguments
    parameters = forward_parameters(module) or {}
    found: list[Callable[[object], Repair]] = []
    if place_only:
        found.append(RestartPositions)
    if reads_offsets and takes_any_keyword(parameters) and kwargs.get(VARLEN_KEYS[0]) is None:
        found.append(HandBoundaries)
    mask = _mask_argument(module, args, kwargs)
    attends = any(_is_square(value) for value in (*args, *kwargs.values())) or isinstance(
        getattr(module, "is_causal", None), bool
    )
    if mask is not None and attends:
        found += [MaskOtherDocuments, MarkOtherDocuments, AttentionPerDocument]
    return [*found, OncePerDocument, OncePerLength]


def _first_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise UnsupportedModelError("an attention module was called without any floating tensor")


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device


def takes_lazy_mask(arguments: Arguments) -> bool:
    """Whether a call was handed the lazy mask of `neat_varlen`."""
    args, kwargs = arguments
    return any(isinstance(value, LazyMask) for value in (*args, *kwargs.values()))
