"""The commands `audit` and `card`, for `typer`."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from ..errors import NeatPackingError
from .cards import CARDS, render_cards, stale_cards, write_cards
from .gpu_tables import read_gpu_report
from .loading import load_model
from .model_audit import audit_model
from .report import print_report, print_zoo, report_json
from .zoo_run import ATTENTIONS, RESULTS, read_results, run_zoo, worst_verdict


def audit_command(
    model: Annotated[
        str | None, typer.Argument(help="A model type, a folder, or a model on the Hub.")
    ] = None,
    attn: Annotated[
        str | None,
        typer.Option("--attn", help="Attention key; default: neat_varlen, with --zoo all."),
    ] = None,
    zoo: Annotated[
        bool, typer.Option("--zoo", help="Audit every type that transformers knows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hooks: Annotated[
        bool, typer.Option(help="Attach the hooks that the model needs before the audit.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option(help="Processes of --zoo; default: one per CPU.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="JSON lines of --zoo; a stopped run goes on.")
    ] = RESULTS,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --zoo: forget earlier results.")
    ] = False,
) -> None:
    """Measure whether packed rows give every document what it gets alone; exit 1 if not."""
    console = Console()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if zoo == (model is not None):
        console.print("Name a model, or pass --zoo: `hf-neat-packing audit llama`.")
        raise typer.Exit(2)
    if model is not None:
        raise typer.Exit(
            _audit_one(model, attn or "neat_varlen", console, hooks=hooks, as_json=as_json)
        )
    attentions = (attn,) if attn else ATTENTIONS
    lines = run_zoo(results, attentions=attentions, jobs=jobs, fresh=fresh)
    if as_json:
        console.print_json(json.dumps(lines))
    else:
        print_zoo(lines, console)
    # A refusal by name is an answer; what is wrong or breaks is not.
    bad = {"wrong", "inconclusive", "raises"}
    raise typer.Exit(int(any(worst_verdict(line["runs"]) in bad for line in lines)))


def card_command(
    check: Annotated[
        bool, typer.Option("--check", help="Compare only; exit 1 if a page is stale.")
    ] = False,
    results: Annotated[Path, typer.Option(help="JSON lines of a zoo run.")] = RESULTS,
    directory: Annotated[Path, typer.Option(help="Where the pages lie.")] = CARDS,
) -> None:
    """Write the model cards and their index from measured results."""
    console = Console()
    lines = read_results(results)
    if not lines:
        console.print(f"{results} holds no results. Make them with `hf-neat-packing audit --zoo`.")
        raise typer.Exit(2)
    gpu = read_gpu_report()
    if not check:
        changed = write_cards(lines, directory, gpu)
        console.print(f"{len(changed)} page(s) written in {directory}")
        return
    stale = stale_cards(render_cards(lines, gpu), directory)
    for path in stale:
        console.print(f"stale: {path}", highlight=False, soft_wrap=True)
    if stale:
        console.print("Write them again with `hf-neat-packing card`.")
        raise typer.Exit(1)


def _audit_one(name: str, attention: str, console: Console, *, hooks: bool, as_json: bool) -> int:
    from ..isolation import isolate

    notes: list[str] = []
    try:
        model = load_model(name, attention)
        if hooks:
            notes = str(isolate(model)).splitlines()
        report = audit_model(model)
    except NeatPackingError as error:
        if as_json:
            console.print_json(json.dumps({"verdict": "refused", "reason": str(error)}))
        else:
            console.print(f"[yellow]refused[/]: {error}", highlight=False, soft_wrap=True)
        return 1
    if as_json:
        console.print_json(report_json(report))
    else:
        for line in notes:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        print_report(report, console)
    return 0 if report.verdict == "exact" else 1
