"""The truth: every document run alone, in float64, and how far rounding alone moves it.

The truth is made by a copy of the model with eager attention, so it shares neither the batch nor
the attention key with what is audited. The same copy in the audited dtype says how large an error
is that nobody is to blame for: that distance, not a constant, is the bound of every comparison.

Legend: `N` documents, `L` tokens of one document, `V` vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..packed_batch import IGNORE_INDEX
from ..wrappers import unwrap
from .batches import PackedInputs
from .running import Output, cross_entropy_sum, forward

SLACK: Final = 4.0
"""How many times the error of the document alone an error may be: other kernels round otherwise."""


@dataclass
class Totals:
    """Documents alone, in one dtype.

    Attributes:
        values: logits of each document, `[L, V]`.
        loss: summed loss of all documents.
        own_loss: the model's own loss, weighted by the labels of each document; None without one.
        gradients: summed over the documents, by parameter.
        norms: sum over the documents of each gradient's norm: what rounding is relative to.
    """

    values: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    own_loss: float | None = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """What every document gets alone, with bounds.

    Attributes:
        exact: in the oracle's dtype.
        alone: in the audited dtype.
        dtype: of the oracle.
        shifted: whether the model's loss compares each token with the next one's label.
        num_labels: labels that the loss of all documents alone counts.
        note: what the oracle could not do, or an empty string.
    """

    exact: Totals
    alone: Totals
    dtype: torch.dtype
    shifted: bool
    num_labels: int
    note: str

    @property
    def values_bound(self) -> float:
        """Largest error of a logit that rounding explains."""
        pairs = zip(self.alone.values, self.exact.values, strict=True)
        error = max(largest_difference(a, e) for a, e in pairs)
        scale = max(float(e.abs().max()) for e in self.exact.values)
        return SLACK * (error + self._epsilon * scale)

    @property
    def loss_bound(self) -> float:
        """Largest error of the summed loss that rounding explains."""
        count = max(self.num_labels, 1)
        error = abs(self.alone.loss - self.exact.loss)
        # Errors of single tokens cancel in a sum by luck; those of the logits do not.
        return SLACK * (error + self._epsilon * abs(self.exact.loss)) + count * self.values_bound

    def gradient_bound(self, name: str) -> float:
        """Largest norm of a parameter gradient's error that rounding explains."""
        error = float((self.alone.gradients[name].double() - self.exact.gradients[name]).norm())
        return SLACK * (error + self._epsilon * self.exact.norms[name])

    @property
    def _epsilon(self) -> float:
        return torch.finfo(self.alone.values[0].dtype).eps


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
            self._known[mode] = _truth(copied, self._packed, gradients=self._gradients)
        return self._known[mode]


def _truth(copied: nn.Module, packed: PackedInputs, *, gradients: bool) -> Truth:
    shifted = loss_is_shifted(copied, packed)
    count = num_labels(packed, shifted=shifted)
    alone = _totals(copied, packed, shifted=shifted, gradients=gradients)
    try:
        exact = _totals(
            _widened(copied, torch.float64), packed, shifted=shifted, gradients=gradients
        )
        return Truth(exact, alone, torch.float64, shifted, count, "")
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    copied = _widened(copied, torch.float32)
    exact = _totals(copied, packed, shifted=shifted, gradients=gradients)
    if alone.values[0].dtype == torch.float32:
        # Nothing wider runs: rounding is measured by moving every weight by its last bit.
        _move_by_last_bit(copied)
        alone = _totals(copied, packed, shifted=shifted, gradients=gradients)
    note = f"the oracle is float32: float64 does not run ({reason})"
    return Truth(exact, alone, torch.float32, shifted, count, note)


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
    inputs = packed.alone(longest)
    labels = packed.spans[longest].of(packed.input_ids).clone()
    # Every label is different from its neighbours' position, so one of the two sums fits.
    with torch.no_grad():
        try:
            output = forward(model, {**inputs, "labels": labels[None]})
        except Exception:
            return True
    if output.loss is None or output.values.ndim != 3:
        return True
    length = len(labels)
    sums = {
        shift: float(cross_entropy_sum(output.values[0].double(), labels, shifted=shift))
        / (length - shift)
        for shift in (True, False)
    }
    return abs(float(output.loss) - sums[True]) <= abs(float(output.loss) - sums[False])


def _totals(model: nn.Module, packed: PackedInputs, *, shifted: bool, gradients: bool) -> Totals:
    totals = Totals()
    own_loss, counted = 0.0, 0
    parameters = dict(model.named_parameters()) if gradients else {}
    for document, span in enumerate(packed.spans):
        model.zero_grad(set_to_none=True)
        labels = span.of(packed.labels)
        with torch.set_grad_enabled(gradients):
            output = _run_alone(model, packed.alone(document), labels)
            loss = cross_entropy_sum(output.values[0], labels, shifted=shifted)
        totals.values.append(output.values[0].detach())
        totals.loss += loss.item()
        count = int((labels[1 if shifted else 0 :] != IGNORE_INDEX).sum())
        if output.loss is None or output.has_auxiliary or output.loss.ndim:
            totals.own_loss = None
        elif count:
            # One mean over all documents weights each document's mean by its labels.
            own_loss, counted = own_loss + count * output.loss.item(), counted + count
        if loss.requires_grad:
            loss.backward()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                _add(totals, name, parameter)
    model.zero_grad(set_to_none=True)
    if totals.own_loss is not None:
        totals.own_loss = own_loss / counted if counted else None
    return totals


def _run_alone(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Output:
    try:
        return forward(model, {**inputs, "labels": labels[None]})
    except Exception:
        # A model without a loss, or one that cannot take a document without labels that count.
        return forward(model, inputs)


def _add(totals: Totals, name: str, parameter: Tensor) -> None:
    gradient = parameter.grad
    gradient = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
    totals.norms[name] = totals.norms.get(name, 0.0) + float(gradient.double().norm())
    known = totals.gradients.get(name)
    totals.gradients[name] = gradient if known is None else known + gradient


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
