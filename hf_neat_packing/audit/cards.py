"""Model cards from measured results: one for each family of the most used types, and an index of all.

Nothing on a card is written by hand: results in, Markdown out, and `stale_cards` compares.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from .batches import LENGTHS
from .zoo_run import worst_verdict

Result = Mapping[str, Any]

CARDS: Final = Path("model_cards")

MOST_USED: Final = (
    *(
        "llama",
        "llama4_text",
        "mistral",
        "ministral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    ),
    *(
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
    ),
    *(
        "gemma4_text",
        "phi",
        "phi3",
        "phimoe",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "gpt_oss",
    ),
    *(
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "olmo_hybrid",
        "deepseek_v2",
    ),
    *(
        "deepseek_v3",
        "deepseek_v4",
        "glm",
        "glm4",
        "glm4_moe",
        "cohere",
        "cohere2",
        "starcoder2",
        "stablelm",
    ),
    *(
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "smollm3",
        "exaone4",
        "ernie4_5",
        "hunyuan_v1_dense",
    ),
    *(
        "nemotron",
        "nemotron_h",
        "mamba",
        "mamba2",
        "falcon_mamba",
        "falcon_h1",
        "bamba",
        "jamba",
        "zamba2",
    ),
    *(
        "lfm2",
        "lfm2_moe",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "minimax",
        "minimax_m2",
        "kimi_linear",
    ),
    *("bert:masked", "roberta:masked", "modernbert:masked", "distilbert:masked", "electra:masked"),
)
"""Types whose families have a card."""

_LOAD = """\
import hf_neat_packing
from hf_neat_packing import DataCollatorForNeatPacking
{imports}from transformers import {auto}

model = {auto}.from_pretrained("path/to/your/model", attn_implementation="{attention}")
{isolate}collator = DataCollatorForNeatPacking(model)"""


def render_cards(results: Iterable[Result]) -> dict[str, str]:
    """Render every card and the index.

    Args:
        results: lines of a zoo run.

    Returns:
        File name -> Markdown, `README.md` being the index.
    """
    results = list(results)
    known = {result["model_type"]: result for result in results}
    families = {known[name]["family"] for name in MOST_USED if name in known}
    pages = {}
    for family in sorted(families):
        members = [result for result in results if result["family"] == family]
        pages[_file(family)] = _render("card.md.jinja", **_card(family, members))
    pages["README.md"] = _render("index.md.jinja", **_index(results, families))
    return pages


def write_cards(results: Iterable[Result], directory: Path = CARDS) -> list[Path]:
    """Write every card and the index; pages of families that are gone are removed.

    Args:
        results: lines of a zoo run.
        directory: where the pages lie.

    Returns:
        The files that changed.
    """
    pages = render_cards(results)
    changed = stale_cards(pages, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path in changed:
        if path.name in pages:
            path.write_text(pages[path.name])
        else:
            path.unlink()
    return changed


def stale_cards(pages: Mapping[str, str], directory: Path = CARDS) -> list[Path]:
    """List the pages that differ from what their results say, are missing, or should not be there."""
    there = {path.name for path in directory.glob("*.md")}
    differing = {
        name
        for name, text in pages.items()
        if name not in there or (directory / name).read_text() != text
    }
    return sorted(directory / name for name in differing | (there - set(pages)))


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


def _card(family: str, members: Sequence[Result]) -> dict[str, Any]:
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


def _index(results: Sequence[Result], families: set[str]) -> dict[str, Any]:
    attentions = list(dict.fromkeys(run["attention"] for r in results for run in r["runs"]))
    rows = []
    for result in results:
        first = [run for run in result["runs"] if run["attention"] == attentions[0]]
        rows.append(
            {
                "model_type": result["model_type"],
                "model": result["model"],
                "card": _file(result["family"]) if result["family"] in families else "",
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


def _file(family: str) -> str:
    return f"{family}.md"


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_neat_packing.audit", "."),
        autoescape=False,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(**values)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
