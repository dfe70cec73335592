"""The checks of an audit, each with the number that it stands on.

Legend: `B` rows, `S` tokens in a row, `N` documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..packed_batch import IGNORE_INDEX
from ..wrappers import unwrap
from .batches import PackedInputs
from .oracle import Truth, largest_difference
from .reach import boundaries_seen
from .result import RUNS, Check
from .running import Output, cross_entropy_sum, forward

MOST_DOCUMENTS = 8
"""Documents of a batch that are changed one by one; more of them are sampled evenly."""


def sampled(packed: PackedInputs) -> list[int]:
    """Choose the documents that isolation is measured on: all, or a few spread over the batch."""
    count = len(packed.spans)
    if count <= MOST_DOCUMENTS:
        return list(range(count))
    return [round(i * (count - 1) / (MOST_DOCUMENTS - 1)) for i in range(MOST_DOCUMENTS)]


def moved_by(model: nn.Module, packed: PackedInputs, values: Tensor, document: int) -> float:
    """Change every token of one document and return the largest change of any other document's output.

    Args:
        model: called once.
        packed: the batch.
        values: outputs of the unchanged batch `[B, S, ...]`.
        document: the one to change.
    """
    with torch.no_grad():
        changed = forward(model, packed.changed(document)).values
    where = packed.others(document)
    if torch.equal(changed[where], values[where]):
        return 0.0
    return largest_difference(changed[where], values[where])


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


def bitwise_isolation(
    model: nn.Module,
    packed: PackedInputs,
    values: Tensor,
    *,
    bound: float,
    documents: Sequence[int],
) -> tuple[Check, int | None]:
    """Change every token of a document: no bit of another document's output moves.

    Where experts are chosen by token, matrix sizes follow the tokens of the whole batch and the last bits
    may follow the sizes. A movement within the bound of rounding is passed, and said; whether the
    documents are connected is then decided by the gradients, which are exactly zero or not.

    Returns:
        The check, and the first document that moved another by more than rounding.
    """
    moved = {d: moved_by(model, packed, values, d) for d in documents}
    worst = max(moved.values())
    if worst == 0.0:
        return Check(
            "isolation, bitwise", True, f"{len(moved)} documents changed, no bit moved", 0.0, 0.0
        ), None
    if worst <= bound:
        words = f"changes move other documents by at most {worst:.1e}, within rounding; the gradients decide"
        return Check("isolation, bitwise", True, words, worst, bound), None
    document = next(d for d, size in moved.items() if not size <= bound)
    words = f"changing document {document + 1} moves other documents by {worst:.2g}"
    return Check("isolation, bitwise", False, words, worst, 0.0), document


def no_backward() -> Check:
    """The documents alone have no gradients either: nothing to compare."""
    return Check("isolation, gradients", None, "documents alone have no backward in this mode")


@dataclass(frozen=True)
class _Embedded:
    """One call of a table of embeddings: what it was given and what it returned."""

    module: nn.Module
    ids: Tensor
    output: Tensor


def gradient_isolation(
    model: nn.Module, packed: PackedInputs, *, documents: Sequence[int]
) -> tuple[Check, int | None]:
    """The gradient of a document's output with respect to every other document's embeddings is zero.

    Args:
        model: run once, with one backward for each document.
        packed: the batch.
        documents: those whose outputs are looked at.

    Returns:
        The check, and the first document whose output depends on another one.
    """
    captured: list[_Embedded] = []

    def capture(module: nn.Module, args: Any, output: Any) -> None:
        # Some tables of positions are given a mask.
        if args and isinstance(args[0], Tensor) and args[0].dtype in (torch.int64, torch.int32):
            if output.is_leaf and not output.requires_grad:
                output.requires_grad_()
            output.retain_grad()
            captured.append(_Embedded(module, args[0], output))

    handles = [
        module.register_forward_hook(capture)
        for module in unwrap(model).modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        values = forward(model, packed.batch).values
    finally:
        for handle in handles:
            handle.remove()
    captured = _of_tokens(captured, packed.input_ids)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(values.shape[-1], generator=generator).to(values)
    connected, largest, checked = None, 0.0, 0
    for document in documents:
        for call in captured:
            call.output.grad = None
        span = packed.spans[document]
        try:
            (span.of(values) * weights).sum().backward(retain_graph=True)
        except RuntimeError as error:
            model.zero_grad(set_to_none=True)
            return _backward_failed("isolation, gradients", error), document
        found, count = _foreign_gradient(packed, document, captured)
        checked += count
        if found and connected is None:
            connected = document
        largest = max(largest, found)
    model.zero_grad(set_to_none=True)
    if not checked:
        return Check("isolation, gradients", None, "no token embedding was seen"), None
    name = "isolation, gradients"
    if connected is None:
        return Check(name, True, "exactly zero between all documents", 0.0, 0.0), None
    words = f"document {connected + 1} depends on another document's embeddings"
    return Check(name, False, words, largest, 0.0), connected


def _foreign_gradient(
    packed: PackedInputs, document: int, captured: Sequence[_Embedded]
) -> tuple[float, int]:
    """Largest gradient at the embeddings of other documents, and how many tokens were looked at."""
    ids = packed.input_ids
    own = set(packed.spans[document].of(ids).tolist())
    shared = own | set(ids[packed.document_map == 0].tolist())
    foreign_ids = torch.tensor(
        sorted(set(ids[packed.others(document)].tolist()) - shared), device=ids.device
    )
    largest, count = 0.0, 0
    for call in captured:
        if call.ids.shape != call.output.shape[: call.ids.ndim]:
            continue
        if call.ids.shape == ids.shape and torch.equal(call.ids, ids):
            where = packed.others(document)
        else:
            # Laid out otherwise, as one document per row: tokens are told apart by their ids.
            where = torch.isin(call.ids, foreign_ids)
        count += int(where.sum())
        if call.output.grad is not None and bool(where.any()):
            largest = max(largest, float(call.output.grad[where].abs().max()))
    return largest, count


def _of_tokens(captured: Sequence[_Embedded], ids: Tensor) -> list[_Embedded]:
    """Keep the calls of tables that were given all tokens: positions and types share their numbers."""
    return [
        call
        for call in captured
        if torch.isin(
            ids, torch.cat([c.ids.flatten() for c in captured if c.module is call.module])
        ).all()
    ]


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


def _backward_failed(name: str, error: RuntimeError) -> Check:
    reason = (str(error).splitlines() or [""])[0][:160]
    return Check(name, False, f"the backward raised {type(error).__name__}: {reason}")


def label_count(packed: PackedInputs, truth: Truth) -> Check:
    """The packed row counts as many labels as its documents alone."""
    labels = packed.labels
    counted = int((labels[:, 1:] if truth.shifted else labels).ne(IGNORE_INDEX).sum())
    good = counted == truth.num_labels
    detail = f"{counted} labels count, {truth.num_labels} in the documents alone"
    if (
        not truth.shifted
        and "labels" in packed.batch
        and all(int(span.of(labels)[0]) == IGNORE_INDEX for span in packed.spans)
    ):
        detail += "; this loss does not shift, so the label of each document's first token is lost"
    return Check("label count", good, detail)


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
        return _backward_failed("gradients", problem), None
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
