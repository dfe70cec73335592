"""Find the first module through which one document reaches another.

Every module of a model is watched in two runs that differ in one document only. The first module, in
the order in which modules finish, whose output changed for the other documents although its inputs
for them did not, is where the leak is: children finish before their parents, so it is the
deepest one.

Legend: `B` rows, `S` tokens in a row, `C` channels.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import DOCUMENT_MAP_KEY, VARLEN_KEYS
from ..layer_masks import text_config
from ..wrappers import unwrap

Digest = Callable[[Tensor], Tensor]
"""Reduces the vectors of tokens, `[B, S, C]`, to one number for each."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPE_LISTS = ("layer_types", "layers_block_type", "attention_layers", "attn_layers", "block_types")


@dataclass
class Call:
    """One call of one module.

    Attributes:
        name: of the module in the model.
        module: the module.
        inputs: digests of its floating inputs, `[B, S]` each.
        output: digest of its output `[B, S]`, or None where it has no vector per token.
        arguments: what else it was given: masks, offsets, ...
    """

    name: str
    module: nn.Module
    inputs: list[Tensor]
    output: Tensor | None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where in a model something happens.

    Attributes:
        name: of the module, `model.layers.1.conv`.
        class_name: of the module.
        layer_type: of the layer it lies in, as the config says, or an empty string.
        parent: the module around it.
    """

    name: str
    class_name: str
    layer_type: str
    parent: nn.Module

    def __str__(self) -> str:
        layer = f", a {self.layer_type!r} layer" if self.layer_type else ""
        return f"{self.name} ({self.class_name}{layer})"


def bits(laid: Tensor) -> Tensor:
    """Sum the bits of each token: equal vectors have equal sums, and both zeros count as one."""
    whole = (laid + 0.0).contiguous().view(_BITS[laid.element_size()])
    sums: Tensor = whole.to(torch.int64).sum(-1)
    return sums


def norms(laid: Tensor) -> Tensor:
    """Take the norm of each token in float64: comparable where rounding differs."""
    result: Tensor = laid.double().norm(dim=-1)
    return result


def by_token(value: Tensor, rows: int, length: int) -> Tensor | None:
    """Lay a tensor out by token, `[B, S, C]`.

    Args:
        value: `[B, S, ...]`, `[B * S, ...]`, or channels first `[B, C, S or more]`.
        rows: `B`.
        length: `S`.

    Returns:
        None where the tensor has none of these shapes.
    """
    if value.ndim < 2 or not value.is_floating_point():
        return None
    value = value.detach()
    if value.shape[:2] == (rows, length) or value.shape[0] == rows * length:
        return value.reshape(rows, length, -1)
    if value.ndim == 3 and value.shape[0] == rows and value.shape[2] >= length:
        return value[:, :, :length].transpose(1, 2)
    return None


@contextmanager
def watched(
    model: nn.Module, rows: int, length: int, *, digest: Digest = bits
) -> Iterator[list[Call]]:
    """Record every module call inside the block, in the order in which calls finish.

    Args:
        model: gets a hook on each module, taken off at the end.
        rows: `B` of the batch.
        length: `S` of the batch.
        digest: what is kept of each token.
    """
    calls: list[Call] = []

    def reduced(values: Iterator[Tensor]) -> list[Tensor]:
        laid = (by_token(value, rows, length) for value in values)
        return [digest(value) for value in laid if value is not None]

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            kept = {k: kwargs.get(k) for k in ("attention_mask", *VARLEN_KEYS, DOCUMENT_MAP_KEY)}
            inputs = [*reduced(_tensors(args)), *reduced(_tensors(kwargs))]
            result = next(iter(reduced(_tensors(output))), None)
            calls.append(Call(name, module, inputs, result, kept))

        return hook

    # Registered last, so what is seen is what the next module gets.
    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in unwrap(model).named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_difference(
    calls: list[Call], others: list[Call], differs: Callable[[Tensor, Tensor], bool]
) -> tuple[Call, Call] | None:
    """Find the first call whose output differs although its inputs agree.

    Args:
        calls: of one run.
        others: of another run of the same model, compared call by call for each module.
        differs: compares two digests, on the tokens that matter.

    Returns:
        The call in both runs; None where no output differs. Where every differing output has a
        differing input, something acted between two modules: the call before it.
    """
    fallback, before = None, None
    known = _numbered(others)
    for key, a in _numbered(calls).items():
        b = known.get(key)
        if b is None or a.output is None or b.output is None:
            continue
        if not differs(a.output, b.output):
            before = (a, b) if fallback is None else before
            continue
        pairs = zip(a.inputs, b.inputs, strict=False)
        if a.inputs and not any(differs(x, y) for x, y in pairs):
            return a, b
        fallback = fallback or before or (a, b)
    return fallback


def _numbered(calls: list[Call]) -> dict[tuple[str, int], Call]:
    """Number the calls of each module; a layer may run several times."""
    counts: dict[str, int] = {}
    numbered = {}
    for call in calls:
        counts[call.name] = counts.get(call.name, 0) + 1
        numbered[call.name, counts[call.name]] = call
    return numbered


def place_of(model: nn.Module, name: str) -> Place:
    """Describe a module of a model: its class, the class around it, and the type of its layer."""
    inner = unwrap(model)
    module = inner.get_submodule(name)
    parent = inner.get_submodule(name.rpartition(".")[0]) if name else inner
    layer_type = ""
    if found := re.search(r"\.(\d+)(\.|$)", name):
        layer_type = _layer_type(inner, int(found.group(1)))
    return Place(name or "the model itself", type(module).__name__, layer_type, parent)


def _layer_type(model: Any, index: int) -> str:
    config = getattr(model, "config", None)
    if config is None:
        return ""
    text = text_config(config)
    for list_name in _TYPE_LISTS:
        types = getattr(text, list_name, None)
        if isinstance(types, (list, tuple)) and index < len(types):
            return str(types[index])
    return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        # Masks are no hidden states, and what they let through is told by the outputs.
        for name, item in value.items():
            if "mask" not in str(name) and "position" not in str(name):
                yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
