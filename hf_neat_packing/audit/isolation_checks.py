"""Isolation checks: without a tolerance, nothing of one document reaches another.

Legend: `B` rows, `S` tokens in a row, `N` documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..wrappers import unwrap
from .batches import PackedInputs
from .oracle import largest_difference
from .result import Check
from .running import forward

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
            return backward_failed("isolation, gradients", error), document
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


def decided_by_gradients(isolation: Check, connection: Check) -> Check:
    """Fail a movement within rounding where no gradient shows that documents are unconnected."""
    if not isolation.passed or not isolation.measured or connection.passed:
        return isolation
    words = f"{isolation.detail}, and they do not show that documents are apart"
    return Check(isolation.name, False, words, isolation.measured, 0.0)


def backward_failed(name: str, error: RuntimeError) -> Check:
    """A backward raised, as checkpointing does where it notices another recomputation."""
    reason = (str(error).splitlines() or [""])[0][:160]
    return Check(name, False, f"the backward raised {type(error).__name__}: {reason}")
