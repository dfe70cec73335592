"""Audit every model type that transformers can build, under every attention key and layout.

One line of JSON for each type, written as soon as it is known: a run that was stopped goes on where
it was. `python -m hf_neat_packing.audit.zoo_run` and `hf-neat-packing audit --zoo` are the same.
"""

import gc
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from .._compat import environment
from ..collator import DataCollatorForNeatPacking
from ..errors import NeatPackingError, UnsupportedModelError
from .batches import PackedInputs, random_documents, read_batch
from .model_audit import audit_packed
from .oracle import Truths
from .result import AuditReport
from .zoo import model_class_name, model_types, tiny_model

ATTENTIONS: Final = ("neat_varlen", "sdpa", "eager")
RESULTS: Final = Path("model_cards/results/zoo.jsonl")

_ROW = 24
_RECYCLE = 24


@dataclass(frozen=True)
class Layout:
    """How the audit's documents are laid into rows.

    Attributes:
        name: as cards call it.
        options: of the collator.
        rows: documents of each row; None leaves it to the collator.
    """

    name: str
    options: Mapping[str, Any]
    rows: tuple[int, ...] | None


LAYOUTS: Final = (
    Layout("one row", {}, None),
    Layout("padded rows", {"row_length": _ROW, "rows": "packs"}, (3, 2)),
)


def run_zoo(
    path: Path = RESULTS,
    *,
    types: Sequence[str] = (),
    attentions: Sequence[str] = ATTENTIONS,
    jobs: int | None = None,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Audit many types in parallel and return their results, in the order of the types.

    Args:
        path: JSON lines; types that are there with the same versions are not run again.
        types: default: all.
        attentions: keys to try.
        jobs: processes; default: one for each CPU.
        fresh: forget what is in the file.

    Returns:
        One result for each type, as `audit_type` makes it.
    """
    wanted = tuple(types) or model_types()
    known = {} if fresh else {line["model_type"]: line for line in read_results(path)}
    versions = _versions()
    known = {
        name: line
        for name, line in known.items()
        if line["versions"] == versions
        and set(attentions) <= {r["attention"] for r in line["runs"]}
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = [name for name in wanted if name not in known]
    if not pending:
        return [known[name] for name in wanted]
    with tqdm(total=len(wanted), initial=len(wanted) - len(pending), unit="type") as bar:
        for result in _in_processes(pending, tuple(attentions), jobs or os.cpu_count() or 1):
            known[result["model_type"]] = result
            # Rewritten whole, through a second file: a stop in between loses nothing.
            _write(path, known)
            bar.set_postfix_str(result["model_type"])
            bar.update()
    return [known[name] for name in wanted]


def read_results(path: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the lines of a zoo run; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def audit_type(model_type: str, attentions: Sequence[str] = ATTENTIONS) -> dict[str, Any]:
    """Audit one type under each key and layout, hooks included.

    Args:
        model_type: one of `model_types()`.
        attentions: keys to try.

    Returns:
        `model_type`, `model` (class), `family`, `versions`, and `runs`: for each key and layout
        `attention`, `layout`, `verdict` (`exact`, `wrong`, `inconclusive`, `refused`, `raises` or
        `cannot build`), `reason`, `notes`, `mode`, `oracle`, `checks` (name -> passed, error,
        bound), `finding`, and where hooks
        were needed `hooks`, `unpacked` and `plain`, the verdict without them.
    """
    line: dict[str, Any] = {
        "model_type": model_type,
        "model": model_class_name(model_type),
        "family": model_type.partition(":")[0],
        "versions": _versions(),
        "runs": [],
    }
    try:
        model = tiny_model(model_type)
    except UnsupportedModelError as error:
        line["runs"] = [
            _run(key, layout.name, "cannot build", _words(error))
            for key in attentions
            for layout in LAYOUTS
        ]
        return line
    line["model"] = type(model).__name__
    line["family"] = type(model).__module__.split(".")[2]
    reference = _Reference(model)
    for key in attentions:
        line["runs"] += _runs_of_key(model_type, key, reference)
    return line


class _Reference:
    """The documents of a type and their truth, shared by all keys and layouts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.documents = random_documents(model)
        self._truths: dict[bool | None, Truths] = {}

    def truths(self, packed: PackedInputs) -> Truths:
        """Return the truth of the documents, which every layout of them and of their labels has in common."""
        if packed.shifts_labels not in self._truths:
            self._truths[packed.shifts_labels] = Truths(self.model, packed)
        return self._truths[packed.shifts_labels]


def _runs_of_key(model_type: str, key: str, reference: _Reference) -> list[dict[str, Any]]:
    """Audit a key as it is; where that is not exact, once more with the hooks of `isolate`."""
    try:
        model = tiny_model(model_type, attn_implementation=key)
    except UnsupportedModelError as error:
        return [_run(key, layout.name, "refused", _words(error)) for layout in LAYOUTS]
    plain = [_guarded_audit(model, reference, key, layout) for layout in LAYOUTS]
    if all(run["verdict"] == "exact" for run in plain):
        return plain
    before = [{"plain": {"verdict": r["verdict"], "reason": r["reason"]}} for r in plain]
    try:
        hooks = _isolate(model)
    except NeatPackingError as error:
        return [
            {**_run(key, layout.name, "refused", _words(error)), **was}
            for layout, was in zip(LAYOUTS, before, strict=True)
        ]
    except Exception as error:
        # The search itself failed: what the model does without hooks is all there is.
        return [{**run, "isolation": _words(error)} for run in plain]
    return [
        {**_guarded_audit(model, reference, key, layout), **hooks, **was}
        for layout, was in zip(LAYOUTS, before, strict=True)
    ]


def _guarded_audit(
    model: torch.nn.Module, reference: _Reference, key: str, layout: Layout
) -> dict[str, Any]:
    try:
        return _audit(model, reference, key, layout)
    except NeatPackingError as error:
        return _run(key, layout.name, "refused", _words(error))
    except Exception as error:
        return _run(key, layout.name, "raises", _words(error))


def _isolate(model: torch.nn.Module) -> dict[str, Any]:
    from ..isolation import isolate

    report = isolate(model)
    return {
        "hooks": [
            {
                "repair": applied.repair,
                "class": applied.module_class,
                "modules": len(applied.modules),
                "cost": applied.cost,
            }
            for applied in report.applied
        ],
        "unpacked": report.unpacked,
        "isolation_notes": list(report.notes),
    }


def _audit(
    model: torch.nn.Module, reference: _Reference, key: str, layout: Layout
) -> dict[str, Any]:
    collator = DataCollatorForNeatPacking(model, **layout.options)
    documents: list[Any] = reference.documents
    if layout.rows is not None:
        first = layout.rows[0]
        documents = [documents[:first], documents[first:]]
    packed = read_batch(collator(documents), model, shifts_labels=collator.shifts_labels)
    report = audit_packed(model, packed, reference.truths(packed))
    return _from_report(report, key, layout.name)


def _from_report(report: AuditReport, key: str, layout: str) -> dict[str, Any]:
    reason = report.finding.words if report.finding else "; ".join(c.detail for c in report.failed)
    run = _run(key, layout, report.verdict, "" if report.verdict == "exact" else reason)
    checks = {
        check.name: [check.passed, _short(check.measured), _short(check.bound)]
        for check in report.checks
    }
    finding = None
    if report.finding is not None:
        finding = {"module": report.finding.module, "class": report.finding.class_name}
        finding |= {"layer_type": report.finding.layer_type, "cause": report.finding.cause}
    return run | {
        "mode": report.mode,
        "oracle": report.oracle,
        "notes": list(report.notes),
        "checks": checks,
        "finding": finding,
    }


def _run(key: str, layout: str, verdict: str, reason: str) -> dict[str, Any]:
    return {"attention": key, "layout": layout, "verdict": verdict, "reason": reason}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2e}")


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NeatPackingError) else f"{type(error).__name__}: {text[:300]}"


def _versions() -> dict[str, str]:
    return {
        name: value for name, value in environment().items() if name in ("torch", "transformers")
    }


def _in_processes(
    types: Sequence[str], attentions: tuple[str, ...], jobs: int
) -> Iterator[dict[str, Any]]:
    """Run types in processes of their own, renewed now and then: hundreds of models fill a process."""
    context = multiprocessing.get_context("spawn")
    # `max_tasks_per_child` renews them too, but its pool may hang (python/cpython#115634).
    for first in range(0, len(types), jobs * _RECYCLE):
        with ProcessPoolExecutor(min(jobs, len(types)), context, initializer=_quiet) as pool:
            some = types[first : first + jobs * _RECYCLE]
            futures = [pool.submit(_guarded, name, attentions) for name in some]
            for future in as_completed(futures):
                yield future.result()


def _guarded(model_type: str, attentions: tuple[str, ...]) -> dict[str, Any]:
    try:
        return audit_type(model_type, attentions)
    finally:
        gc.collect()


def _quiet() -> None:
    import warnings

    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def _write(path: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    order = {name: index for index, name in enumerate(model_types())}
    ordered = sorted(lines.values(), key=lambda line: order.get(line["model_type"], len(order)))
    temporary = path.with_suffix(".part")
    temporary.write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered)
    )
    temporary.replace(path)


def worst_verdict(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the least good verdict of some runs."""
    order = ("wrong", "inconclusive", "raises", "refused", "cannot build", "exact")
    return min((str(run["verdict"]) for run in runs), key=order.index)


if __name__ == "__main__":
    run_zoo()
