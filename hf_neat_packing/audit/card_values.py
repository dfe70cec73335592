"""What stands on a model card and in the index, gathered from measured results.

A result is one line of a zoo run: a type with its runs, one for each attention key and layout.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .batches import LENGTHS
from .zoo_run import worst_verdict

Result = Mapping[str, Any]

_LOAD = """\
import hf_neat_packing
from hf_neat_packing import DataCollatorForNeatPacking
{imports}from transformers import {auto}

model = {auto}.from_pretrained("path/to/your/model", attn_implementation="{attention}")
{isolate}collator = DataCollatorForNeatPacking(model)"""


def loading_snippet(result: Result) -> str:
    """Write how to load a type of the zoo for packed training, with hooks where it needs them.

    Args:
        result: a line of a zoo run.
    """
    runs = result["runs"]
    attentions = list(dict.fromkeys(run["attention"] for run in runs))
    exact = [key for key in attentions if _verdict(runs, key) == "exact"]
    attention = exact[0] if exact else attentions[0]
    hooks = any(run.get("plain") for run in runs if run["attention"] == attention)
    masked = result["model_type"].endswith(":masked")
    return _LOAD.format(
        auto="AutoModelForMaskedLM" if masked else "AutoModelForCausalLM",
        attention=attention,
        imports="from hf_neat_packing.isolation import isolate\n" if hooks else "",
        isolate="isolation = isolate(model)  # its hooks stay on for as long as the model is trained\n"
        if hooks
        else "",
    )


def card_values(family: str, members: Sequence[Result]) -> dict[str, Any]:
    """Gather what the card of one family shows.

    Args:
        family: name of the modelling module that its types share.
        members: the results of its types.
    """
    runs = [(result, run) for result in members for run in result["runs"]]
    best = next((r for r in members if r["runs"][0]["verdict"] == "exact"), members[0])
    return {
        "title": family,
        "summary": _summary(members),
        "layouts": list(dict.fromkeys(run["layout"] for _, run in runs)),
        "rows": [_row(result, group) for result, group in _by_attention(members)],
        "snippet": loading_snippet(best),
        "costs": sorted(
            {
                (f"{hook['repair']} (`{hook['class']}`)", hook["cost"])
                for _, run in runs
                for hook in run.get("hooks", ())
            }
        ),
        "reasons": _reasons(runs),
        "errors": [
            _errors(result, group)
            for result, group in _by_attention(members)
            if any(run.get("checks") for run in group)
        ],
        "versions": _versions(members),
        "notes": sorted(
            {
                note
                for _, run in runs
                for note in (*run.get("notes", ()), *run.get("isolation_notes", ()))
            }
        ),
        "model_types": [result["model_type"] for result in members],
    }


def _summary(members: Sequence[Result]) -> str:
    parts = []
    for key in dict.fromkeys(run["attention"] for result in members for run in result["runs"]):
        counts = Counter(_verdict(result["runs"], key) for result in members)
        found = ", ".join(f"{verdict} ({count})" for verdict, count in counts.items())
        parts.append(f"`{key}`: {found if len(members) > 1 else next(iter(counts))}")
    return "; ".join(parts) + "."


def _by_attention(members: Sequence[Result]) -> list[tuple[Result, list[Result]]]:
    """Group the runs of each type by attention key: one run for each layout."""
    return [
        (result, [run for run in result["runs"] if run["attention"] == key])
        for result in members
        for key in dict.fromkeys(run["attention"] for run in result["runs"])
    ]


def _row(result: Result, group: Sequence[Result]) -> dict[str, Any]:
    return {
        "model_type": result["model_type"],
        "model": result["model"],
        "attention": group[0]["attention"],
        "plain": worst_verdict([run.get("plain") or run for run in group]),
        "verdicts": [run["verdict"] for run in group],
        "hooks": _hooks(group[0]),
    }


def _hooks(run: Result) -> str:
    if run.get("unpacked"):
        return "whole model on one document per padded row"
    hooks = [f"{h['repair']}: {h['class']} ({h['modules']})" for h in run.get("hooks", ())]
    if hooks:
        return "; ".join(hooks)
    needed = run.get("plain") and run["verdict"] == "exact"
    return "at the entry of the model" if needed else ""


def _reasons(runs: Sequence[tuple[Result, Result]]) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], str] = {}
    for result, run in runs:
        if run["verdict"] != "exact":
            where = f"`{result['model_type']}` under `{run['attention']}` ({run['verdict']})"
            found.setdefault((where, run["reason"]), run["reason"])
    return [(where, reason or "no reason was recorded") for (where, _), reason in found.items()]


def _errors(result: Result, group: Sequence[Result]) -> dict[str, str]:
    """Write the error of each kind that is nearest to its bound, of all layouts."""

    def worst(name: str) -> tuple[str, str]:
        found = [run["checks"].get(name, (None, None, None)) for run in group if run.get("checks")]
        numbers = [(error, bound) for _, error, bound in found if error is not None]
        if not numbers:
            return "", ""
        error, bound = max(numbers, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
        return _number(error), _number(bound)

    row = {"model_type": result["model_type"], "attention": group[0]["attention"]}
    for name in ("outputs", "loss", "gradients"):
        row[name], row[f"{name}_bound"] = worst(name)
    row["moved"] = worst("isolation, bitwise")[0]
    return row


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def index_values(results: Sequence[Result], families: set[str]) -> dict[str, Any]:
    """Gather what the index of all types shows.

    Args:
        results: of all types.
        families: those that have a card.
    """
    attentions = list(dict.fromkeys(run["attention"] for r in results for run in r["runs"]))
    rows = []
    for result in results:
        first = [run for run in result["runs"] if run["attention"] == attentions[0]]
        rows.append(
            {
                "model_type": result["model_type"],
                "model": result["model"],
                "card": card_file(result["family"]) if result["family"] in families else "",
                "verdicts": [_verdict(result["runs"], key) for key in attentions],
                "hooks": _hooks(first[0]) if first else "",
            }
        )
    return {
        "num_types": len(results),
        "num_encoders": sum(":" in result["model_type"] for result in results),
        "versions": _versions(results),
        "lengths": ", ".join(map(str, LENGTHS)),
        "attentions": attentions,
        "counts": [_counts(results, key) for key in attentions],
        "rows": rows,
    }


def _counts(results: Sequence[Result], key: str) -> dict[str, Any]:
    verdicts = Counter(_verdict(result["runs"], key) for result in results)
    plain = sum(
        _verdict(result["runs"], key) == "exact"
        and not any(run.get("plain") for run in result["runs"] if run["attention"] == key)
        for result in results
    )
    named = {verdict.replace(" ", "_"): count for verdict, count in verdicts.items()}
    zeros = dict.fromkeys(
        ("exact", "refused", "raises", "wrong", "inconclusive", "cannot_build"), 0
    )
    return {"attention": key, "plain": plain, **zeros, **named}


def _verdict(runs: Sequence[Result], key: str) -> str:
    return worst_verdict([run for run in runs if run["attention"] == key])


def _versions(results: Sequence[Result]) -> str:
    versions = {f"{n} {v}" for result in results for n, v in result["versions"].items()}
    return ", ".join(sorted(versions))


def card_file(family: str) -> str:
    """Name the file of a family's card."""
    return f"{family}.md"
