"""What every module of a model was given and gave, in one forward, and where two forwards part.

Legend: `S` tokens in a row, `L` tokens of a document.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.mask_entry import LazyMask
from ..hooks.running import top


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        name: its name in the model.
        module: the module.
        number: how often it was called before in this forward.
        arguments: positional and keyword arguments, tensors copied.
        output: what it returned, tensors copied.
    """

    name: str
    module: nn.Module
    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    output: Any


class Recording:
    """Records the calls of all modules of a model, in the order in which they return.

    Calls inside a part that runs on regrouped documents are left out: their tokens lie otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[ModuleCall] = []
        self._entered: list[tuple[str, nn.Module, Any]] = []
        self._counts: dict[str, int] = {}

    def __enter__(self) -> "Recording":
        self._handles = []
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(
                    self._enterer(name), with_kwargs=True, prepend=True
                ),
                module.register_forward_hook(self._leaver(name)),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def unfinished(self) -> ModuleCall | None:
        """Return the call that was entered last and never left: where a forward raised."""
        if not self._entered:
            return None
        name, module, arguments = self._entered[-1]
        return ModuleCall(name, module, self._counts.get(name, 0), arguments, None)

    def _enterer(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not _regrouped():
                self._entered.append((name, module, (_copied(args), _copied(kwargs))))

        return enter

    def _leaver(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if _regrouped():
                return
            places = [at for at, entry in enumerate(self._entered) if entry[1] is module]
            if not places:
                return
            del self._entered[places[-1] + 1 :]  # calls that raised, and were caught by the model
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            arguments = self._entered.pop()[2]
            self.calls.append(ModuleCall(name, module, number, arguments, _copied(output)))

        return leave


def _regrouped() -> bool:
    frame = top()
    return frame is not None and frame.regrouped


def _copied(value: Any) -> Any:
    if isinstance(value, LazyMask) or not isinstance(value, (Tensor, tuple, list, Mapping)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    return tuple(_copied(part) for part in value)


def first_parting(
    one: list[ModuleCall],
    other: list[ModuleCall],
    spans: tuple[slice, slice],
    lengths: tuple[int, int],
    *,
    tolerance: float,
    skip: set[str],
) -> ModuleCall | None:
    """Find the deepest first module that gets the same for a document in two forwards and gives another output.

    Args:
        one: a recording.
        other: the other recording.
        spans: the tokens to compare in each of them.
        lengths: tokens of a row in each of them.
        tolerance: largest difference of outputs, relative to the largest value, that counts as none;
            inputs must agree ten times better.
        skip: names of modules that are passed over.

    Returns:
        The call in the first recording, or None.
    """
    known = {(call.name, call.number): call for call in other}
    for call in one:
        twin = known.get((call.name, call.number))
        if twin is None or call.name in skip:
            continue
        given = list(_differences(call.arguments, twin.arguments, spans, lengths))
        if any(difference > tolerance / 10 for difference in given):
            continue
        if not given and any(t.is_floating_point() for _, t in _tensors(call.arguments)):
            continue
        if outputs_part(call, twin, spans, lengths, tolerance=tolerance):
            return call
    return None


def outputs_part(
    call: ModuleCall,
    twin: ModuleCall,
    spans: tuple[slice, slice],
    lengths: tuple[int, int],
    *,
    tolerance: float,
) -> bool:
    """Whether two calls gave different outputs for a document."""
    differences = _differences(call.output, twin.output, spans, lengths)
    return any(difference > tolerance for difference in differences)


def _differences(
    one: Any, other: Any, spans: tuple[slice, slice], lengths: tuple[int, int]
) -> Iterator[float]:
    twins = dict(_tensors(other))
    for path, tensor in _tensors(one):
        if path in twins:
            difference = _difference(tensor, twins[path], spans, lengths)
            if difference is not None:
                yield difference


def _difference(
    one: Tensor, other: Tensor, spans: tuple[slice, slice], lengths: tuple[int, int]
) -> float | None:
    """Compare the document's part of two tensors; None where they have no such part."""
    if one.ndim != other.ndim or isinstance(one, LazyMask) or isinstance(other, LazyMask):
        return None
    if _counts_the_row(one):
        return None  # a counter of the row differs by what it is; whoever reads it is to blame
    places = (0, 1) if one.is_floating_point() else (0, 1, one.ndim - 1)
    for place in places:
        if place >= one.ndim or (one.shape[place], other.shape[place]) != lengths:
            continue
        rest = [
            (a, b)
            for at, (a, b) in enumerate(zip(one.shape, other.shape, strict=True))
            if at != place
        ]
        if any(a != b for a, b in rest):
            continue
        before = (slice(None),) * place
        return relative_difference(one[(*before, spans[0])], other[(*before, spans[1])])
    return None


def _counts_the_row(value: Tensor) -> bool:
    whole = not (value.is_floating_point() or value.is_complex())
    if not whole or value.ndim == 0 or value.shape[-1] < 2:
        return False
    return bool((value.long().diff(dim=-1) == 1).all())


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two tensors relative to the largest value; inf where one is not finite."""
    if one.numel() == 0:
        return 0.0
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double(), other.double()
    difference = float((one - other).abs().max())
    if difference != difference or not torch.isfinite(one).equal(torch.isfinite(other)):
        both = torch.isfinite(one) & torch.isfinite(other)
        same = torch.equal(torch.isfinite(one), torch.isfinite(other))
        return relative_difference(one[both], other[both]) if same else float("inf")
    return difference / (float(other.abs().max()) or 1.0)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _tensors(part, f"{path}.{name}")
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _tensors(part, f"{path}.{number}")
