"""Parity checks: outputs, loss and gradients of packed documents against each document alone.

Legend: `B` rows, `S` tokens in a row, `N` documents.
"""

import torch
from torch import Tensor, nn

from ..loss_labels import IGNORE_INDEX
from ..wrappers import unwrap
from .batches import PackedInputs
from .isolation_checks import backward_failed
from .oracle import Truth, largest_difference
from .reach import boundaries_seen
from .result import LABELS, RUNS, Check
from .running import Output, cross_entropy_sum, forward


def does_not_run(error: Exception) -> Check:
    """The packed batch makes the model raise."""
    return Check(RUNS, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def repetition(repeatable: bool) -> Check:
    """A batch gives the same result whatever ran before it."""
    words = "gives the same bits again" if repeatable else "gives other results"
    return Check("no state between calls", repeatable, f"a batch {words} after another batch")


def finite(packed: PackedInputs, values: Tensor) -> Check:
    """No output of a document is NaN or infinite."""
    good = bool(torch.isfinite(values[packed.document_map != 0]).all())
    return Check("finite outputs", good, "all finite" if good else "NaN or infinite outputs")


def values_parity(
    packed: PackedInputs, values: Tensor, truth: Truth
) -> tuple[Check, tuple[int, ...]]:
    """Outputs of each document equal those of the document alone.

    Returns:
        The check, and the documents that are off.
    """
    errors = [
        largest_difference(span.of(values), exact)
        for span, exact in zip(packed.spans, truth.values, strict=True)
    ]
    bound = truth.values_bound
    worst = max(errors)
    off = tuple(d for d, error in enumerate(errors) if not error <= bound)
    name = "outputs"
    if not off:
        return Check(name, True, f"{len(errors)} documents within rounding", worst, bound), off
    names = ", ".join(str(d + 1) for d in off[:8])
    return Check(name, False, f"documents {names} differ from themselves alone", worst, bound), off


def own_loss_parity(model: nn.Module, packed: PackedInputs, truth: Truth) -> Check:
    """The model's own loss equals the mean over the documents alone, weighted by their labels."""
    name = "loss"
    if truth.own_loss is None:
        return Check(name, None, "no loss of its own that documents alone have too")
    with torch.no_grad():
        output = forward(model, {**packed.batch, "labels": packed.labels})
    if output.loss is None:
        return Check(name, None, "the packed batch gives no loss")
    error = abs(float(output.loss) - truth.own_loss)
    bound = truth.loss_bound
    return Check(
        name,
        error <= bound,
        f"{float(output.loss):.6f}, alone {truth.own_loss:.6f}",
        error,
        bound,
    )


def label_count(packed: PackedInputs, truth: Truth) -> Check:
    """The packed row counts as many labels as its documents alone."""
    labels = packed.labels
    counted = int((labels[:, 1:] if truth.shifted else labels).ne(IGNORE_INDEX).sum())
    good = counted == truth.num_labels
    detail = f"{counted} labels count, {truth.num_labels} in the documents alone"
    if packed.shifts_labels not in (None, truth.shifted):
        good = False
        detail += (
            "; this loss does not shift, so the label of each document's first token is lost"
            if packed.shifts_labels
            else "; this loss shifts, so the first label of a document is the target of the one before it"
        )
    elif (
        not truth.shifted
        and "labels" in packed.batch
        and all(int(span.of(labels)[0]) == IGNORE_INDEX for span in packed.spans)
    ):
        detail += "; this loss does not shift, and no document's first token has a label"
    return Check(LABELS, good, detail)


def gradient_parity(
    packed: PackedInputs, output: Output, model: nn.Module, truth: Truth
) -> tuple[Check, str | None]:
    """The gradient of every parameter equals the sum over the documents alone.

    Args:
        packed: the documents.
        output: of a forward with gradients.
        model: its parameters get gradients, which are taken away again.
        truth: documents alone.

    Returns:
        The check, and the parameter that is furthest off.
    """
    model.zero_grad(set_to_none=True)
    losses = [
        cross_entropy_sum(span.of(output.values), span.of(packed.labels), shifted=truth.shifted)
        for span in packed.spans
    ]
    try:
        torch.stack(losses).sum().backward()
    except RuntimeError as problem:
        model.zero_grad(set_to_none=True)
        return backward_failed("gradients", problem), None
    inner = unwrap(model)
    worst, worst_name, error_there, bound_there, count = 0.0, None, 0.0, 0.0, 0
    for name, parameter in inner.named_parameters():
        if name not in truth.gradients:
            continue
        count += 1
        exact = truth.gradients[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error, bound = float((gradient.double() - exact).norm()), truth.gradient_bound(name)
        ratio = 0.0 if error == 0 else error / bound if bound else float("inf")
        if not ratio <= worst:
            worst, worst_name, error_there, bound_there = ratio, name, error, bound
    model.zero_grad(set_to_none=True)
    good = worst <= 1.0
    words = f"{count} parameters within rounding"
    if not good:
        words = f"the gradient of {worst_name} is off by {error_there:.2g}"
    return Check("gradients", good, words, error_there, bound_there), None if good else worst_name


def boundaries_reach_attention(model: nn.Module, packed: PackedInputs) -> Check:
    """Every attention layer was told about boundaries; isolation itself is measured elsewhere."""
    seen = boundaries_seen(model, packed)
    if not seen:
        return Check(
            "boundaries reach attention", None, "no layer calls transformers' attention functions"
        )
    missing = [name for name, how in seen.items() if not how]
    if missing:
        return Check(
            "boundaries reach attention",
            False,
            f"nothing reached {missing[0]} ({len(missing)} of {len(seen)})",
        )
    ways = sorted(set(seen.values()))
    return Check("boundaries reach attention", True, f"{len(seen)} layers: {', '.join(ways)}")
