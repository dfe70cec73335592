"""The truth: every document run alone, in float64, and how far rounding alone moves it.

The truth is made by a copy of the model with eager attention, so it shares neither the batch nor
the attention key with what is audited. The same copy in the audited dtype says how large an error
is that nobody is to blame for: that distance, not a constant, is the bound of every comparison.

Legend: `N` documents, `L` tokens of one document, `V` vocabulary.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..label_shift import measured_shift
from ..loss_labels import IGNORE_INDEX
from ..wrappers import unwrap
from .batches import PackedInputs
from .running import cross_entropy_sum, forward, without_cache

SLACK: Final = 4.0
"""How many times the error of the document alone an error may be: other kernels round otherwise."""


@dataclass(frozen=True)
class Truth:
    """What every document gets alone, with bounds.

    Attributes:
        values: outputs of each document alone in the oracle's dtype, `[L, V]`.
        values_error: largest distance of the audited dtype from them.
        loss: summed loss of all documents.
        loss_error: summed distances of the audited dtype from each document's part.
        own_loss: the model's own loss over all documents; None without one.
        gradients: summed over the documents, by parameter; empty where they were not asked for.
        gradient_errors: by parameter, summed norms of each document's distance.
        gradient_norms: by parameter, summed norms of each document's gradient.
        epsilon: of the audited dtype.
        dtype: of the oracle.
        shifted: whether the model's loss compares each token with the next one's label.
        num_labels: labels that the loss of all documents alone counts.
        differentiable: whether documents alone have a backward in this mode.
        note: what the oracle could not do, or an empty string.
    """

    values: tuple[Tensor, ...]
    values_error: float
    loss: float
    loss_error: float
    own_loss: float | None
    gradients: Mapping[str, Tensor]
    gradient_errors: Mapping[str, float]
    gradient_norms: Mapping[str, float]
    epsilon: float
    dtype: torch.dtype
    shifted: bool
    num_labels: int
    differentiable: bool
    note: str

    @property
    def values_bound(self) -> float:
        """Largest error of an output that rounding explains."""
        scale = max(float(value.abs().max()) for value in self.values)
        return SLACK * (self.values_error + self.epsilon * scale)

    @property
    def loss_bound(self) -> float:
        """Largest error of the mean loss that rounding explains."""
        count = max(self.num_labels, 1)
        # A token's loss moves at most twice as far as its logits.
        return (
            SLACK * (self.loss_error + self.epsilon * abs(self.loss)) / count
            + 2 * self.values_bound
        )

    def gradient_bound(self, name: str) -> float:
        """Largest norm of a parameter gradient's error that rounding explains.

        Where a gradient cancels, as that of a key's bias does, what is left is rounding of the
        parts, which are as large as other gradients of the model.
        """
        largest = max(self.gradient_norms.values())
        return SLACK * (self.gradient_errors[name] + self.epsilon * largest)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference in float64; infinite where one of them is not finite."""
    difference = (a.double() - b.double()).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")


class Truths:
    """The truth of some documents, made when it is asked for and kept for each mode.

    Args:
        model: is copied once for each mode; the copy is run alone and converted in place.
        packed: the documents. Other layouts of the same documents have the same truth.
        gradients: also of every parameter.
    """

    def __init__(self, model: nn.Module, packed: PackedInputs, *, gradients: bool = True) -> None:
        self._model, self._packed, self._gradients = model, packed, gradients
        self._known: dict[str, Truth] = {}

    def in_mode(self, mode: str) -> Truth:
        """Return the truth in `train` or `eval` mode."""
        if mode not in self._known:
            copied = _eager_copy(self._model).train(mode == "train")
            try:
                truth = _truth(copied, self._packed, gradients=self._gradients)
            except Exception as error:
                # Some models run in evaluation but have a backward in training only.
                copied = _eager_copy(self._model).train(mode == "train")
                truth = _truth(copied, self._packed, gradients=False)
                note = f"no gradients were compared: documents alone have none in {mode} mode ({_line(error)})"
                truth = replace(truth, differentiable=False, note=note)
            self._known[mode] = truth
        return self._known[mode]


def _truth(audited: nn.Module, packed: PackedInputs, *, gradients: bool) -> Truth:
    shifted = loss_is_shifted(audited, packed)
    dtype = next(p.dtype for p in audited.parameters() if p.is_floating_point())
    try:
        exact = _widened(copy.deepcopy(audited), torch.float64)
        truth = _compare(audited, exact, packed, dtype, shifted=shifted, gradients=gradients)
        if dtype != torch.float32 or _is_same_function(truth):
            return truth
        reason = "it computes something else, as where random hashes are drawn anew for each dtype"
    except Exception as error:
        reason = _line(error)
    exact = _widened(copy.deepcopy(audited), torch.float32)
    if dtype == torch.float32:
        # Nothing wider runs: rounding is measured by moving every weight by its last bit.
        _move_by_last_bit(audited)
    truth = _compare(audited, exact, packed, dtype, shifted=shifted, gradients=gradients)
    return replace(truth, note=f"the oracle is float32, not float64: {reason}")


def _compare(
    audited: nn.Module,
    exact: nn.Module,
    packed: PackedInputs,
    dtype: torch.dtype,
    *,
    shifted: bool,
    gradients: bool,
) -> Truth:
    """Run every document alone in both models, and sum up the truth and the distances from it."""
    sums = _Sums()
    for document in range(len(packed.spans)):
        pair = [
            _run_alone(model, packed, document, shifted=shifted, gradients=gradients)
            for model in (audited, exact)
        ]
        sums.add(*pair)
    own = sums.own_loss / sums.counted if sums.has_own_loss and sums.counted else None
    return Truth(
        values=tuple(sums.values),
        values_error=sums.values_error,
        loss=sums.loss,
        loss_error=sums.loss_error,
        own_loss=own,
        gradients=sums.gradients,
        gradient_errors=sums.errors,
        gradient_norms=sums.norms,
        epsilon=torch.finfo(dtype).eps,
        dtype=next(p.dtype for p in exact.parameters() if p.is_floating_point()),
        shifted=shifted,
        num_labels=num_labels(packed, shifted=shifted),
        differentiable=True,
        note="",
    )


@dataclass
class _Alone:
    """One document run alone: values `[L, V]`, summed loss, own loss with its labels, gradients."""

    values: Tensor
    loss: float
    own_loss: float | None
    counted: int
    gradients: dict[str, Tensor]


class _Sums:
    """What the documents add up to."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.values_error = self.loss = self.loss_error = self.own_loss = 0.0
        self.counted, self.has_own_loss = 0, True
        self.gradients: dict[str, Tensor] = {}
        self.errors: dict[str, float] = {}
        self.norms: dict[str, float] = {}

    def add(self, audited: _Alone, exact: _Alone) -> None:
        self.values.append(exact.values)
        error = largest_difference(audited.values, exact.values)
        self.values_error = max(self.values_error, error)
        self.loss += exact.loss
        self.loss_error += abs(audited.loss - exact.loss)
        if exact.own_loss is None:
            self.has_own_loss = False
        elif exact.counted:
            # One mean over all documents weights each document's mean by its labels.
            self.own_loss += exact.counted * exact.own_loss
            self.counted += exact.counted
        for name, gradient in exact.gradients.items():
            distance = float((audited.gradients[name].double() - gradient.double()).norm())
            self.errors[name] = self.errors.get(name, 0.0) + distance
            self.norms[name] = self.norms.get(name, 0.0) + float(gradient.double().norm())
            known = self.gradients.get(name)
            self.gradients[name] = gradient if known is None else known + gradient


def _run_alone(
    model: nn.Module, packed: PackedInputs, document: int, *, shifted: bool, gradients: bool
) -> _Alone:
    labels = packed.spans[document].of(packed.labels)
    inputs = packed.alone(document)
    with torch.set_grad_enabled(gradients):
        try:
            output = forward(model, {**inputs, "labels": labels[None]}, cached=False)
        except Exception:
            # A model without a loss, or one that cannot take a document without labels that count.
            output = forward(model, inputs, cached=False)
        loss = cross_entropy_sum(output.values[0], labels, shifted=shifted)
    if loss.requires_grad:
        loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if gradients and parameter.requires_grad:
            gradient = parameter.grad
            found[name] = torch.zeros_like(parameter) if gradient is None else gradient
        parameter.grad = None
    own = output.loss
    usable = own is not None and not output.has_auxiliary and own.ndim == 0
    return _Alone(
        values=output.values[0].detach(),
        loss=loss.item(),
        own_loss=own.item() if own is not None and usable else None,
        counted=int((labels[1 if shifted else 0 :] != IGNORE_INDEX).sum()),
        gradients=found,
    )


def _is_same_function(truth: Truth) -> bool:
    """Whether two dtypes agree in half their digits: rounding never takes more."""
    scale = max(float(value.abs().max()) for value in truth.values)
    return bool(truth.values_error <= truth.epsilon**0.5 * scale)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _move_by_last_bit(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randn(parameter.shape, generator=generator).to(parameter.device) > 0
            step = torch.finfo(parameter.dtype).eps * (2.0 * up - 1.0)
            parameter.mul_(1.0 + step.to(parameter.dtype))


def num_labels(packed: PackedInputs, *, shifted: bool) -> int:
    """Count the labels that count in the documents when each is alone."""
    first = 1 if shifted else 0
    return sum(int((span.of(packed.labels)[first:] != IGNORE_INDEX).sum()) for span in packed.spans)


def loss_is_shifted(model: nn.Module, packed: PackedInputs) -> bool:
    """Measure whether the model's loss compares a token with the next one's label.

    A model without a loss is taken for a causal one if it predicts as one: by default.
    """
    longest = max(range(len(packed.spans)), key=lambda d: packed.spans[d].length)
    measured = measured_shift(model, without_cache(model, packed.alone(longest)))
    return True if measured is None else measured


def _eager_copy(model: nn.Module) -> nn.Module:
    copied: Any = copy.deepcopy(unwrap(model))
    _quietly(lambda: copied.set_attn_implementation("eager"))
    return copied  # type: ignore[no-any-return]


def _widened(copied: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Grouped matrix products of experts have no float64 kernel.
    experts: Any = copied
    _quietly(lambda: experts.set_experts_implementation("eager"))
    return copied.to(dtype)


def _quietly(change: Callable[[], Any]) -> None:
    """Try a setting that not every model has; the comparison itself shows what it was worth."""
    try:
        change()
    except Exception:
        return
