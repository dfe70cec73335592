"""Audits as tables for people and as JSON for machines."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from .result import AuditReport

_MARKS = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[dim]n/a[/]"}
_COLOURS = {"exact": "green", "refused": "yellow", "wrong": "red"}
_VERDICTS = ("exact", "refused", "raises", "wrong", "inconclusive", "cannot build")


def print_report(report: AuditReport, console: Console) -> None:
    """Print one audit: what was run, every check with its number and bound, and the finding."""
    colour = _COLOURS.get(report.verdict, "red")
    console.print(
        f"[bold]{report.model}[/] under [bold]{report.attention}[/]: [{colour}]{report.verdict}[/]",
        highlight=False,
        soft_wrap=True,
    )
    lengths = ", ".join(map(str, report.lengths[:12])) + (
        ", ..." if len(report.lengths) > 12 else ""
    )
    console.print(
        f"{report.layout}; documents of {lengths} tokens; {report.dtype} on {report.device}, {report.mode} mode; "
        f"truth: each document alone, {report.oracle}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "error", "bound", ""):
        table.add_column(column, justify="right" if column in ("error", "bound") else "left")
    for check in report.checks:
        numbers = [
            "" if value is None else "0" if value == 0 else f"{value:.1e}"
            for value in (check.measured, check.bound)
        ]
        table.add_row(check.name, _MARKS[check.passed], *numbers, check.detail)
    console.print(table, highlight=False)
    if report.finding is not None:
        console.print(
            f"[red]first difference:[/] {report.finding}", highlight=False, soft_wrap=True
        )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def report_json(report: AuditReport) -> str:
    """Write one audit as JSON, with its environment."""
    return json.dumps(report.to_dict(), indent=2)


def count_verdicts(results: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Count the verdicts of a zoo run by attention key.

    Args:
        results: lines of a zoo run.
    """
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for run in result["runs"]:
            counts.setdefault(run["attention"], Counter())[run["verdict"]] += 1
    return counts


def print_zoo(results: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print the counts of a zoo run, and one line for each type that is not exact under some key."""
    results = list(results)
    counts = Table(title=f"{len(results)} model types", box=None, pad_edge=False)
    counts.add_column("attention")
    for verdict in _VERDICTS:
        counts.add_column(verdict, justify="right")
    for attention, found in count_verdicts(results).items():
        counts.add_row(attention, *(str(found.get(verdict, 0)) for verdict in _VERDICTS))
    console.print(counts, highlight=False)
    rest = Table(box=None, pad_edge=False)
    for column in ("type", "attention", "verdict", "reason"):
        rest.add_column(column)
    for result in results:
        for run in result["runs"]:
            if run["verdict"] != "exact":
                rest.add_row(
                    result["model_type"], run["attention"], run["verdict"], run["reason"][:160]
                )
    if rest.row_count:
        console.print(rest, highlight=False)
