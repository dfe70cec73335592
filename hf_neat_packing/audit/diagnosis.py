"""From a failed check to a module, a cause and an advice."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layer_masks import text_config
from ..wrappers import unwrap
from . import causes
from .batches import PackedInputs
from .localise import Call, Place, bits, first_difference, norms, place_of, watched
from .mask_causes import mask_cause
from .result import Finding
from .running import forward

_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")


def diagnose(
    model: nn.Module,
    packed: PackedInputs,
    *,
    repeatable: bool,
    leaking: int | None,
    connected: int | None,
    off: tuple[int, ...],
) -> Finding | None:
    """Name the first module that is wrong, and why.

    Args:
        model: in the mode in which the checks failed.
        packed: the batch.
        repeatable: whether the batch gives the same bits again.
        leaking: a document that moves others, or None.
        connected: a document whose gradients reach others, or None.
        off: documents that differ from themselves alone.

    Returns:
        None where no module's output can be told by token.
    """
    if not repeatable:
        return _between_calls(model, packed)
    if leaking is not None:
        return _between_documents(model, packed, leaking)
    if off:
        return _from_alone(model, packed, off)
    return _backward(model, packed)


def labels_of_another_loss(model: nn.Module) -> Finding:
    """Name the loss that is given labels written for another one."""
    cause, name = causes.LABELS_OF_ANOTHER_LOSS, type(unwrap(model)).__name__
    return Finding("the loss", name, "", cause.code, cause.words, cause.advice)


def _between_calls(model: nn.Module, packed: PackedInputs) -> Finding | None:
    first = _record(model, packed.batch)
    with torch.no_grad():
        forward(model, packed.changed(0))
    found = first_difference(first, _record(model, packed.batch), _anywhere)
    return _finding(model, found, lambda place, call: causes.STATE_BETWEEN_CALLS)


def _between_documents(model: nn.Module, packed: PackedInputs, document: int) -> Finding | None:
    where = packed.others(document)

    def differs(a: Tensor, b: Tensor) -> bool:
        return bool((a != b)[where].any())

    calls = _record(model, packed.batch)
    found = first_difference(calls, _record(model, packed.changed(document)), differs)

    def why(place: Place, call: Call) -> causes.Cause:
        cause = causes.leak_cause(place, call)
        return mask_cause(model, packed) if cause is causes.OWN_MASK_CODE else cause

    return _finding(model, found, why)


def _from_alone(model: nn.Module, packed: PackedInputs, off: tuple[int, ...]) -> Finding | None:
    document = off[0]
    span = packed.spans[document]
    tolerance = torch.finfo(next(model.parameters()).dtype).eps ** 0.5

    def differs(a: Tensor, b: Tensor) -> bool:
        # Half the digits: rounding that has gone through many layers stays below.
        alone, row = (a, b) if a.shape[1] == span.length else (b, a)
        return bool(((alone[0] - span.of(row)).abs() > tolerance * alone[0].abs()).any())

    calls = _record(model, packed.batch, digest=norms)
    alone = _record(model, packed.alone(document), digest=norms, cached=False)
    found = first_difference(calls, alone, differs)
    cause = _parity_cause(model, packed, off)
    return _finding(model, found, lambda place, call: cause)


def _backward(model: nn.Module, packed: PackedInputs) -> Finding | None:
    """Compare what checkpointing computes again in the backward with the forward."""
    rows, length = packed.document_map.shape
    with watched(model, rows, length) as calls:
        values = forward(model, packed.batch).values
        count = len(calls)
        # What checkpointing notices itself it raises, after the modules ran again.
        with suppress(RuntimeError):
            values.square().sum().backward()
    model.zero_grad(set_to_none=True)
    again = calls[count:]
    names = {call.name for call in again}
    found = first_difference([c for c in calls[:count] if c.name in names], again, _anywhere)
    return _finding(model, found, lambda place, call: causes.BACKWARD)


def _parity_cause(model: nn.Module, packed: PackedInputs, off: tuple[int, ...]) -> causes.Cause:
    """Tell the causes apart by which documents are off."""
    spans = [packed.spans[document] for document in off]
    right = [span for d, span in enumerate(packed.spans) if d not in off]
    if _positions_are_ignored(model, packed):
        return causes.POSITIONS_IGNORED
    config = getattr(unwrap(model), "config", None)
    text = text_config(config) if config is not None else None
    if _rope_scales_with_length(text):
        return causes.ROPE_BY_LONGEST
    windows = [getattr(text, name, None) for name in _WINDOWS]
    size = min((w for w in windows if isinstance(w, int) and w > 0), default=None)
    if size and all(s.length > size for s in spans) and all(s.length <= size for s in right):
        return causes.WINDOW_LOST
    if all(span.start > 0 for span in spans) and any(span.start == 0 for span in right):
        return causes.ROW_INDEX
    return causes.ROUNDING_OR_UNKNOWN


def _rope_scales_with_length(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return False
    kinds = {parameters.get("rope_type")}
    kinds |= {part.get("rope_type") for part in parameters.values() if isinstance(part, dict)}
    return bool(kinds & {"dynamic", "longrope"})


def _positions_are_ignored(model: nn.Module, packed: PackedInputs) -> bool:
    positions = packed.batch.get("position_ids")
    if not isinstance(positions, Tensor):
        return False
    with torch.no_grad():
        try:
            known = forward(model, packed.batch).values
            # They restart where they did, so whoever reads boundaries from them sees the same ones.
            shifted = {**packed.batch, "position_ids": positions + 1}
            return torch.equal(known, forward(model, shifted).values)
        except Exception:
            return False


def _record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    digest: Callable[[Tensor], Tensor] = bits,
    cached: bool = True,
) -> list[Call]:
    rows, length = inputs["input_ids"].shape
    with torch.no_grad(), watched(model, rows, length, digest=digest) as calls:
        forward(model, inputs, cached=cached)
    return calls


def _anywhere(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a, b)


def _finding(
    model: nn.Module,
    found: tuple[Call, Call] | None,
    why: Callable[[Place, Call], causes.Cause],
) -> Finding | None:
    if found is None:
        return None
    place = place_of(model, found[0].name)
    cause = why(place, found[0])
    return Finding(
        place.name, place.class_name, place.layer_type, cause.code, cause.words, cause.advice
    )
