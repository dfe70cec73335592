"""What one card was measured to do, as tables for the README and the index of cards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

GPU_RESULTS: Final = Path("model_cards/results/gpu.json")


def read_gpu_report(path: Path = GPU_RESULTS) -> dict[str, Any] | None:
    """Read the JSON that `benchmarks/gpu_check.py` wrote, or None where no card was measured."""
    return json.loads(path.read_text()) if path.exists() else None


def gpu_tables(report: Mapping[str, Any]) -> str:
    """Write a report of `benchmarks/gpu_check.py` as Markdown tables.

    Args:
        report: its JSON.
    """
    of = report["environment"]
    lines = [
        f"{of['device']}, torch {of['torch']}, transformers {of['transformers']}, bfloat16.",
        "",
    ]
    lines += ["| kernel | shape | error / allowed | isolated |", "|---|---|---|---|"]
    for row in report["exactness"]:
        said = row.get("not_run") or row.get("error")
        cells = (
            (said, "")
            if said
            else (f"{row['error_of_allowed']:.2f}", "yes" if row["isolated"] else "NO")
        )
        lines.append(f"| {row['kernel']} | {row['shape']} | {cells[0]} | {cells[1]} |")
    waits = report["synchronisations"]
    lines += [
        "",
        f"Waits of the host inside attention: {waits.get('count', waits.get('not_run'))}.",
        "",
    ]
    lines += [
        "| tokens | way | tokens/s | of neat_varlen's time | peak GiB | loss |",
        "|---|---|---|---|---|---|",
    ]
    for step in report["steps"]:
        if "not_run" in step:
            lines.append(f"| {step['tokens']} | {step['way']} | {step['not_run']} | | | |")
            continue
        lines.append(
            f"| {step['tokens']} | {step['way']} | {step['tokens_per_second']:,.0f} | {step.get('ratio', 1.0):.2f} "
            f"| {step['peak_gib']:.2f} | {step['loss']:.4f} |"
        )
    return "\n".join(lines)
