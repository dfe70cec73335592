"""Audit one model: is every document of a packed batch what it is alone?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._compat import environment
from ..capabilities import get_model_attn_implementation
from ..collator import DataCollatorForNeatPacking
from ..errors import NeatPackingError, UnsupportedModelError
from ..wrappers import sharded_modules, unwrap
from . import checks, isolation_checks
from .batches import PackedInputs, random_documents, read_batch
from .diagnosis import diagnose, labels_of_another_loss
from .oracle import Truth, Truths
from .result import LABELS, AuditReport, Check
from .running import forward, preserved, settle_mode, without_cache


def audit_model(
    model: nn.Module,
    *,
    collator: Any = None,
    batch: Mapping[str, Any] | None = None,
    documents: Sequence[Any] | None = None,
    gradients: bool = True,
    seed: int = 0,
) -> AuditReport:
    """Measure whether every document of a packed batch gets what it would get alone.

    Isolation is tested without a tolerance: every token of one document is changed, and no bit of
    another may move; gradients between documents must be exactly zero. Then outputs, loss and the
    gradients of all parameters are compared with each document alone, within bounds that are
    computed from rounding (see `oracle`). Every check has a control that must fail: the same
    tokens without boundaries.

    Args:
        model: any model, in any wrappers. It is left as it was found.
        collator: makes the batch from documents; default: `DataCollatorForNeatPacking(model)`.
        batch: a packed batch of one's own, instead of documents: token columns `[B, S]`, and the images and videos of
            documents, joined in their order.
        documents: what the collator packs; default: five random documents.
        gradients: compare the gradients of all parameters, which takes three times their memory.
        seed: of the random documents.

    Returns:
        The report; `report.raise_for_failure()` turns anything but `exact` into an error.

    Raises:
        BoundaryError: a batch whose documents cannot be told apart.
        NeatPackingError: what the collator refuses for this model.
        UnsupportedModelError: a model whose parameters are split over processes.
    """
    if sharded_modules(model):
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} is sharded (FSDP), and an audit compares gradients of whole parameters "
            "with those of a float64 copy. Audit the model before it is sharded, in one process; "
            "`PackingCallback` runs two documents of the sharded one when training begins."
        )
    shifts_labels = None
    if batch is None:
        collator = DataCollatorForNeatPacking(model) if collator is None else collator
        batch = collator(documents or random_documents(model, seed=seed))
        shifts_labels = getattr(collator, "shifts_labels", None)
    packed = read_batch(batch, model, shifts_labels=shifts_labels)
    return audit_packed(model, packed, Truths(model, packed, gradients=gradients))


def assert_isolated(model: nn.Module, batch: Mapping[str, Any] | None = None) -> None:
    """Raise unless a model keeps the documents of packed rows apart; see `audit_model`.

    Args:
        model: the model.
        batch: a packed batch; default: five random documents.

    Raises:
        UnsupportedModelError: what failed, where, why, and what to do.
    """
    audit_model(model, batch=batch).raise_for_failure()


def audit_packed(model: nn.Module, packed: PackedInputs, truths: Truths) -> AuditReport:
    """Audit one batch against a truth that several layouts or attention keys share.

    Args:
        model: left as it was found.
        packed: the batch.
        truths: of the same documents and weights.
    """
    with preserved(model):
        return _audit(model, packed, truths)


def _audit(model: nn.Module, packed: PackedInputs, truths: Truths) -> AuditReport:
    notes: list[str] = []
    try:
        packed, note, mode, repeatable = _settle(model, packed, truths)
    except NeatPackingError:
        raise
    except Exception as error:
        truth = truths.in_mode("eval")
        return _report(model, packed, truth, "eval", [checks.does_not_run(error)], None, [])
    truth = truths.in_mode(mode)
    notes += [text for text in (note, truth.note) if text]
    output = forward(model, packed.batch)
    values = output.values.detach()
    chosen = isolation_checks.sampled(packed)
    isolation, leaking = isolation_checks.bitwise_isolation(
        model, packed, values, bound=truth.values_bound, documents=chosen
    )
    connection, connected = isolation_checks.no_backward(), None
    if truth.differentiable:
        connection, connected = isolation_checks.gradient_isolation(model, packed, documents=chosen)
    isolation = isolation_checks.decided_by_gradients(isolation, connection)
    parity, off = checks.values_parity(packed, values, truth)
    done = [checks.repetition(repeatable), checks.finite(packed, values)]
    done += [isolation, connection, parity, checks.own_loss_parity(model, packed, truth)]
    if truth.gradients:
        done.append(checks.gradient_parity(packed, output, model, truth)[0])
    done.append(checks.label_count(packed, truth))
    finding = None
    failed = {check.name for check in done if check.passed is False}
    if failed == {LABELS}:
        finding = labels_of_another_loss(model)
    elif failed:
        finding = diagnose(
            model, packed, repeatable=repeatable, leaking=leaking, connected=connected, off=off
        )
    reach = checks.boundaries_reach_attention(model, packed)
    if reach.passed is False and finding is None:
        # What was measured counts: a model may keep documents apart in a way of its own.
        notes.append(f"{reach.detail}, yet documents are isolated")
        reach = Check(reach.name, None, reach.detail)
    if output.has_auxiliary:
        notes.append("part of the loss is made over the batch by design: the router's balance loss")
    done += [reach, *_controls(model, packed, truth)]
    return _report(model, packed, truth, mode, done, finding, notes)


def _settle(
    model: nn.Module, packed: PackedInputs, truths: Truths
) -> tuple[PackedInputs, str, str, bool]:
    """Find the mode of the audit; without labels where the model's loss breaks for documents alone too."""
    try:
        return packed, "", *settle_mode(model, packed.batch, packed.changed(0))
    except NeatPackingError:
        raise
    except Exception:
        if "labels" not in packed.batch or truths.in_mode("eval").own_loss is not None:
            raise
        bare = {name: value for name, value in packed.batch.items() if name != "labels"}
        packed = replace(packed, batch=bare)
        note = "the model's own loss raises for documents alone too; the audit runs without labels"
        return packed, note, *settle_mode(model, packed.batch, packed.changed(0))


def _controls(model: nn.Module, packed: PackedInputs, truth: Truth) -> list[Check]:
    """Run the batch without boundaries: what does not fail there could not have failed before."""
    try:
        batch, values = _without_boundaries(model, packed)
    except NeatPackingError:
        words = "a batch without boundaries is refused"
        return [Check("control: no boundaries", True, words, is_control=True)]
    bare = PackedInputs(batch, packed.document_map, packed.spans, packed.protected)
    # Causal rows leak forward, so the first document is changed and the last of each row looked at.
    first = (0,)
    last = tuple({span.row: d for d, span in enumerate(packed.spans)}.values())
    outcomes = (
        isolation_checks.bitwise_isolation(
            model, bare, values, bound=truth.values_bound, documents=first
        )[0],
        isolation_checks.gradient_isolation(model, bare, documents=last)[0]
        if truth.differentiable
        else isolation_checks.no_backward(),
        checks.values_parity(bare, values, truth)[0],
    )
    return [
        Check(
            f"control: {outcome.name}",
            not outcome.passed if outcome.passed is not None else None,
            "fails without boundaries, as it must"
            if not outcome.passed
            else "passes without boundaries too, so passing says nothing",
            outcome.measured,
            outcome.bound,
            is_control=True,
        )
        for outcome in outcomes
    ]


def _without_boundaries(
    model: nn.Module, packed: PackedInputs
) -> tuple[dict[str, Any], torch.Tensor]:
    with torch.no_grad():
        try:
            batch = without_cache(model, packed.without_boundaries())
            return batch, forward(model, batch).values
        except NeatPackingError:
            raise
        except Exception:
            # Positions that run on may leave the model's table of them.
            batch = without_cache(model, packed.without_boundaries(running_positions=False))
            return batch, forward(model, batch).values


def _report(
    model: nn.Module,
    packed: PackedInputs,
    truth: Truth,
    mode: str,
    done: list[Check],
    finding: Any,
    notes: list[str],
) -> AuditReport:
    inner = unwrap(model)
    parameter = next(inner.parameters())
    return AuditReport(
        model=type(inner).__name__,
        model_type=getattr(getattr(inner, "config", None), "model_type", ""),
        attention=get_model_attn_implementation(model),
        layout=_layout(packed),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        mode=mode,
        rows=packed.document_map.shape[0],
        lengths=tuple(span.length for span in packed.spans),
        oracle=str(truth.dtype).removeprefix("torch."),
        checks=tuple(done),
        finding=finding,
        notes=tuple(notes),
        environment=environment(),
    )


def _layout(packed: PackedInputs) -> str:
    names = [name for name in ("cu_seq_lens_q", "attention_mask") if name in packed.batch]
    padded = bool((packed.document_map == 0).any())
    boundaries = {"cu_seq_lens_q": "varlen offsets", "attention_mask": "4-D mask"}
    how = " and ".join(boundaries[name] for name in names) or "document map"
    return f"{packed.document_map.shape[0]} row(s){', padded' if padded else ''}: {how}"
