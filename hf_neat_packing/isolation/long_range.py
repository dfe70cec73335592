"""Couplings that only show in long rows or documents, found by what modules say about themselves.

A probe of a few tokens cannot see them, so these modules are repaired whether or not a short row shows it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..hooks.recurrent import PerDocument
from ..hooks.running import RowLayout
from .base import Removable, Repair


class TemperatureOfLongRows(Repair):
    """Count the attention temperature of a layer without positions from each document's start.

    The temperature is 1 up to `floor_scale` tokens, so shorter rows need nothing.
    """

    name = "attention temperature counted per document"
    cost = "for rows longer than `floor_scale`: these layers run once per document"

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module scales its queries by their place in the row."""
        tuned = getattr(module, "attn_temperature_tuning", None)
        return bool(tuned) and not getattr(module, "use_rope", False)

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks of `PerDocument` on a module, for long rows."""
        hooks = PerDocument(self.scope, masks="cut", needed=_is_tempered)
        return [*hooks.attach(module)]


def _is_tempered(module: nn.Module, layout: RowLayout) -> bool:
    return layout.row_length >= getattr(module, "floor_scale", 0)


class RotaryTablesPerDocument(Repair):
    """Choose the scaled rotary table (`dynamic`, `longrope`) by each document's own length.

    One document longer than the original length changes the table of every other one, in padded
    batches too. Documents up to the original length share one call.
    """

    name = "scaled rotary table chosen per document"
    cost = "for documents longer than the original length: one call per distinct length of the rotary module"

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether the frequencies of a rotary module depend on the longest position."""
        return bool(set(_rope_types(module)) & {"dynamic", "longrope"})

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks of `PerDocument` on a rotary module; the layers' attention stays untouched."""
        groups = _LengthGroups(_stated_length(module), by_length="dynamic" in _rope_types(module))
        hooks = PerDocument(
            self.scope, groups=groups, within_rows=True, needed=groups.differ, before=_forget
        )
        return [*hooks.attach(module)]


class _LengthGroups:
    """Groups of documents that one scaled rotary table serves; compared by value, to share plans."""

    def __init__(self, original: int, *, by_length: bool) -> None:
        self.original, self.by_length = original, by_length

    def __call__(self, lengths: tuple[int, ...]) -> Sequence[Sequence[int]]:
        groups: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            scaled = length if self.by_length else self.original + 1
            groups.setdefault(scaled if length > self.original else 0, []).append(document)
        return [groups[scale] for scale in sorted(groups)]

    def differ(self, module: nn.Module, layout: RowLayout) -> bool:
        """Whether some document is longer than the original length."""
        return max(layout.lengths) >= self.original

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LengthGroups) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.original, self.by_length))


class RotaryLimit(NamedTuple):
    """Up to which length documents share one rotary table, in a model without per-document tables.

    Attributes:
        model: name of its class.
        length: tokens up to which a document is unscaled.
        by_length: whether longer documents have a table for each length (`dynamic`), not one for all (`longrope`).
    """

    model: str
    length: int
    by_length: bool


def rotary_limit(model: nn.Module) -> RotaryLimit | None:
    """Read up to which length a model's documents share one rotary table; None where length does not matter.

    Args:
        model: the unwrapped model.

    Raises:
        UnsupportedModelError: a scaled table that does not say up to which length it is unscaled.
    """
    scaled = [module for module in model.modules() if RotaryTablesPerDocument.fits(module)]
    lengths = [_stated_length(module) for module in scaled]
    if not lengths:
        return None
    by_length = any("dynamic" in _rope_types(module) for module in scaled)
    return RotaryLimit(type(model).__name__, min(lengths), by_length)


def require_one_rotary_table(segments: Sequence[int], limit: RotaryLimit) -> None:
    """Raise where a batch holds documents for which the model would choose different tables alone.

    Args:
        segments: tokens of each document and each padding tail of the batch.
        limit: of the model.

    Raises:
        UnsupportedModelError: naming the lengths.
    """
    longest, shortest = max(segments), min(segments)
    if longest <= limit.length or (shortest > limit.length and not limit.by_length):
        return
    what = (
        "its table would follow the longest document that it has seen"
        if limit.by_length
        else f"the {shortest} tokens of another one would get its table"
    )
    raise UnsupportedModelError(
        f"{limit.model} scales its rotary table for documents of more than {limit.length} tokens, and a batch holds "
        f"{longest}: {what}, and not be computed as alone. Write `isolate(model)` before the collator is built: it "
        f"gives each document its own table. Or keep documents and padding within {limit.length} tokens "
        f"(`pack_dataset(..., max_length={limit.length})`)."
    )


def _stated_length(module: nn.Module) -> int:
    original = original_lengths(module)
    if original is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} scales its rotary table by the longest document, and does not say up to "
            "which length it is unscaled: one long document would change the short ones. Accepted: a rope "
            "config with `original_max_position_embeddings`."
        )
    return original


def _forget(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a dynamic table forget the longest document that it has seen, by showing it one token."""

    def first_token(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        return value[:1, :1] if value.is_floating_point() else torch.zeros_like(value[:1, :1])

    with torch.no_grad():
        module(
            *[first_token(value) for value in args],
            **{name: first_token(value) for name, value in kwargs.items()},
        )


def _rope_types(module: nn.Module) -> tuple[str, ...]:
    found = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        return tuple(found.values())
    return (found,) if isinstance(found, str) else ()


def original_lengths(module: nn.Module) -> int | None:
    """Read up to which length a rotary module is unscaled; the smallest where layer types differ."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    found = [
        part["original_max_position_embeddings"]
        for part in parts
        if isinstance(part.get("original_max_position_embeddings"), int)
    ]
    # The dynamic table compares with what the module remembers, which may come from the config's length.
    remembered = getattr(module, "original_max_seq_len", None)
    if isinstance(remembered, int) and "dynamic" in _rope_types(module):
        found.append(remembered)
    return min(found) if found else None
