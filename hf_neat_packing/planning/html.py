"""A plan as HTML for notebooks: a line of figures, and packs as bars. Nothing to install, no script."""

from typing import TYPE_CHECKING

from hf_neat_packing.planning.shapes import (
    PADDING,
    PALETTE,
    Run,
    chosen_packs,
    runs_of,
    shade_ranges,
)

if TYPE_CHECKING:
    from hf_neat_packing.planning.plan import PackingPlan

_PACKS = 12
_RESOLUTION = 160


def plan_html(plan: "PackingPlan") -> str:
    """Draw a plan.

    Args:
        plan: any plan, also an empty one.

    Returns:
        One `div` with its own styles; a pointer over a bar shows which document it is.
    """
    shown = chosen_packs(len(plan), _PACKS)
    split = plan.split_documents
    rows = "".join(
        _row(
            pack,
            runs_of(plan.pieces(pack), plan.max_length, resolution=_RESOLUTION, split=split),
            plan.max_length,
        )
        for pack in shown
    )
    more = f"{len(shown)} of {len(plan):,} packs" if len(shown) < len(plan) else ""
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;max-width:760px">'
        f'<div style="font-weight:600">{plan.num_documents:,} documents in {len(plan):,} packs of '
        f"{plan.max_length:,} tokens, {plan.fill:.1%} full</div>"
        f'<div style="opacity:.7;margin-bottom:6px">{_facts(plan)}</div>'
        f"{rows}"
        f'<div style="display:flex;flex-wrap:wrap;gap:4px 14px;margin-top:6px;opacity:.85">'
        f"{_legend(plan.max_length)}<span>{more}</span></div></div>"
    )


def _facts(plan: "PackingPlan") -> str:
    accounting = plan.accounting
    facts = [plan.strategy, f"no plan can need fewer than {plan.lower_bound:,} packs"]
    lost = accounting.tokens - accounting.tokens_kept
    facts += [
        f"{count:,} {word}"
        for count, word in (
            (accounting.documents_split, "documents split"),
            (accounting.documents_cut, "documents cut"),
            (accounting.documents_dropped, "documents dropped"),
            (lost, "tokens lost"),
        )
        if count
    ]
    return " · ".join(facts)


def _row(pack: int, runs: list[Run], capacity: int) -> str:
    used = sum(run.length for run in runs if run.documents)
    bars = "".join(_bar(run, capacity) for run in runs)
    return (
        '<div style="display:flex;align-items:center;gap:8px;margin:2px 0">'
        f'<span style="width:48px;text-align:right;opacity:.6">{pack:,}</span>'
        f'<span style="display:flex;flex:1;height:14px">{bars}</span>'
        f'<span style="width:44px;opacity:.6">{used / capacity:.0%}</span></div>'
    )


def _bar(run: Run, capacity: int) -> str:
    width = f"width:{100 * run.length / capacity:.3f}%"
    common = f"{width};border-radius:3px;box-sizing:border-box;border:solid transparent;border-width:0 .5px;"
    if run.documents == 0:
        title = f"{run.length:,} tokens of padding"
        fill = f"background:repeating-linear-gradient(135deg,{PADDING} 0 3px,#8882 3px 5px)"
    else:
        title = f"{run.documents} documents" if run.document < 0 else f"document {run.document:,}"
        title += f": {run.length:,} tokens" + (", a part of it" if run.is_part else "")
        fill = f"background:{PALETTE[run.shade]}"
        if run.is_part:
            fill += ";border-style:dashed;border-color:#c2410c;border-width:0 2px"
    return f'<span title="{title}" style="{common}{fill};background-clip:padding-box"></span>'


def _legend(capacity: int) -> str:
    ranges = shade_ranges(capacity)
    colours = PALETTE[len(PALETTE) - len(ranges) :]
    entries = [
        (colour, f"{low:,} - {high:,}" if low < high else f"{low:,}")
        for colour, (low, high) in zip(colours, ranges, strict=True)
    ]
    entries.append((PADDING, "padding"))
    return "".join(
        f'<span><span style="display:inline-block;width:10px;height:10px;border-radius:2px;'
        f'background:{colour}"></span> {words}</span>'
        for colour, words in entries
    )
