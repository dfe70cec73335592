"""Running a model for the audit without leaving a trace, and reading what it returns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UnsupportedModelError
from ..loss_labels import IGNORE_INDEX
from ..wrappers import forward_parameters, takes_any_keyword, unwrap
from .media import MEDIA_COLUMNS

_SIMPLE = (int, float, bool, str, type(None))


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Give back modes, random state, gradients, buffers and simple attributes as they were found.

    Args:
        model: audited inside; its parameters are not changed by an audit.
    """
    attributes = [(module, _simple_attributes(module)) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, values in attributes:
            vars(module).update(values)
        with torch.no_grad():
            for module, name, buffer, kept in buffers:
                # Rotary tables are replaced, running statistics are written into.
                setattr(module, name, buffer.copy_(kept))


def _simple_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and Nones that a module keeps: its mode, and what some remember of a call."""
    return {name: value for name, value in vars(module).items() if isinstance(value, _SIMPLE)}


@dataclass(frozen=True)
class Output:
    """What one forward returned.

    Attributes:
        values: logits, or hidden states of a model without a head, `[B, S, ...]`.
        loss: the model's own loss, or None.
        has_auxiliary: whether the loss has a part that is made over the batch by design, such as
            the balance loss of a router.
    """

    values: Tensor
    loss: Tensor | None
    has_auxiliary: bool


def forward(model: nn.Module, inputs: Mapping[str, Any], *, cached: bool = True) -> Output:
    """Call a model.

    Args:
        model: called by name, so that its hooks run.
        inputs: keyword arguments; columns that its forward does not take are left out.
        cached: False keeps models from building a cache; some cannot without one more setting.

    Raises:
        UnsupportedModelError: no output has one vector per token.
    """
    rows, length = inputs["input_ids"].shape
    parameters = forward_parameters(unwrap(model))
    if not cached:
        inputs = without_cache(model, inputs)
    if parameters is not None and not takes_any_keyword(parameters):
        inputs = {name: value for name, value in inputs.items() if name in parameters}
    result = model(**in_dtype_of(model, inputs))
    values = _token_values(result, rows, length)
    if values is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} returned nothing of shape [{rows}, {length}, ...] for {rows} rows of "
            f"{length} tokens, so its outputs cannot be compared by document. "
            "Audit the part of the model that keeps its tokens."
        )
    loss = getattr(result, "loss", None)
    auxiliary = getattr(result, "aux_loss", None)
    return Output(values, loss if isinstance(loss, Tensor) else None, auxiliary is not None)


def in_dtype_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Give pixels the dtype of a model, which its copies in other dtypes do not give them."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        name: value.to(dtype)
        if name in MEDIA_COLUMNS and isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a model for no cache, where its forward names that switch."""
    named = "use_cache" in (forward_parameters(unwrap(model)) or {})
    return {**inputs, "use_cache": False} if named else dict(inputs)


def _token_values(result: Any, rows: int, length: int) -> Tensor | None:
    found = [getattr(result, "logits", None), getattr(result, "last_hidden_state", None)]
    if isinstance(result, Tensor):
        found.append(result)
    elif isinstance(result, (tuple, list)):
        found += result
    elif isinstance(result, Mapping):
        found += result.values()
    for value in found:
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim >= 3
            and value.shape[:2] == (rows, length)
        ):
            return value
    return None


def cross_entropy_sum(values: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """Sum the loss of one document's tokens.

    Args:
        values: `[L, V]`; for hidden states of a model without a head, `[L, ...]`, their scaled squares.
        labels: int64 `[L]`, -100 = left out; None of them may be outside the vocabulary.
        shifted: each token predicts the next one's label, not its own.
    """
    if values.ndim != 2 or int(labels.max()) >= values.shape[-1]:
        return values.square().sum() / values.shape[-1]
    if shifted:
        values, labels = values[:-1], labels[1:]
    return functional.cross_entropy(values, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def settle_mode(
    model: nn.Module, inputs: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, bool]:
    """Choose the mode of an audit: training mode where it is deterministic, for people train.

    Args:
        model: left in the mode that was chosen.
        inputs: a batch.
        other: another one, run in between.

    Returns:
        `train`, or `eval` where dropout is on or training mode cannot run; and whether the batch
        gives the same bits again after another one.
    """
    model.train()
    try:
        if _repeats(model, inputs, other):
            return "train", True
    except Exception:
        # What training mode alone cannot do is no matter of packing; eval mode is audited instead.
        pass
    model.eval()
    return "eval", _repeats(model, inputs, other)


def _repeats(model: nn.Module, inputs: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    with torch.no_grad():
        first = forward(model, inputs).values
        forward(model, other)
        return torch.equal(first, forward(model, inputs).values)
