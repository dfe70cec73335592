"""Pictures of a plan: packs as rows of documents, and who attends to whom in one of them.

`save_picture` draws PNG or SVG with matplotlib, which is imported when it is called; `picture_text`
draws packs for a terminal. `PackingPlan` shows itself in notebooks without either.
"""

from collections.abc import Sequence
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_neat_packing.errors import MissingDependencyError, PlanningError
from hf_neat_packing.planning.plan import PackingPlan
from hf_neat_packing.planning.shapes import (
    PADDING,
    PALETTE,
    Run,
    attention_share,
    chosen_packs,
    runs_of,
    shade_of,
    shade_ranges,
)

if TYPE_CHECKING:
    from rich.text import Text

_INK: Final = "#22303c"
_FAINT: Final = "#7b8794"
_SPLIT: Final = "#d55e00"
_HATCH: Final = "#c9c4b8"

# Inches: the figure, what stands above and below the panels, a pack, the mask, and rows at least and at most.
_FIGURE, _ABOVE, _BELOW, _PACK, _SIDE, _ROWS = 12.4, 1.3, 1.05, 6.7, 4.1, (0.235, 0.42)
# Units of the rows' panel: a pack is 100 wide, and the same unit counts downwards.
_WIDTH, _ROUND, _GAP = 100.0, 0.55, 0.14
_RESOLUTION = 320


def save_picture(
    plan: PackingPlan,
    path: str | PathLike[str],
    *,
    packs: int = 24,
    pack: int | None = None,
    causal: bool = True,
) -> Path:
    """Draw packs as rows of documents, and the attention mask of one of them, into a file.

    Args:
        plan: A plan of at least one pack.
        path: PNG, SVG or PDF, by its suffix.
        packs: The most packs to draw; of a larger plan, packs at equal distances.
        pack: The pack whose mask is drawn; default: of the packs drawn, the middle one by documents.
        causal: Whether a token sees only earlier ones of its document; False for encoders.

    Returns:
        The path.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        PlanningError: the plan has no packs.
        IndexError: there is no such pack.
    """
    if not len(plan):
        raise PlanningError(
            f"A plan of {plan.num_documents} documents and no packs has no picture. Accepted: a plan with at least "
            "one pack; print(plan.report) says what became of the documents."
        )
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "A picture needs matplotlib: pip install 'hf-neat-packing[plot]'. picture_text() draws packs in the "
            "terminal without."
        ) from error
    shown = chosen_packs(len(plan), packs)
    if pack is None:
        pack = sorted(shown, key=lambda candidate: len(plan.pieces(candidate)))[len(shown) // 2]
    pieces = plan.pieces(pack)
    pack %= len(plan)
    pitch = min(max(_SIDE / len(shown), _ROWS[0]), _ROWS[1])
    height = _ABOVE + max(_SIDE + 0.25, pitch * len(shown)) + _BELOW
    # Text as text keeps an SVG small and searchable; fixed ids make equal pictures equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "packs", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(_FIGURE, height), facecolor="white")
        _title(figure, plan, height)
        top = 1 - _ABOVE / height
        tall = pitch * len(shown) / height
        rows = figure.add_axes((0.052, top - tall, _PACK / _FIGURE, tall))
        _draw_rows(rows, plan, shown, pack, pitch / _PACK * _WIDTH)
        mask = figure.add_axes((0.655, top - _SIDE / height, _SIDE / _FIGURE, _SIDE / height))
        _draw_mask(mask, [length for _, _, length in pieces], plan.max_length, pack, causal)
        _legend(figure, plan, height)
        # No date: the same plan gives the same bytes.
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=170, metadata=metadata)
    return Path(path)


def _title(figure: Any, plan: PackingPlan, height: float) -> None:
    title = (
        f"{plan.num_documents:,} documents in {len(plan):,} packs of {plan.max_length:,} tokens, "
        f"{plan.fill:.1%} full"
    )
    figure.text(0.052, 1 - 0.42 / height, title, fontsize=15, fontweight="bold", color=_INK)
    accounting = plan.accounting
    facts = [plan.strategy, f"lower bound {plan.lower_bound:,} packs"]
    facts += [
        f"{count:,} documents {word}"
        for count, word in (
            (accounting.documents_split, "split"),
            (accounting.documents_cut, "cut"),
            (accounting.documents_dropped, "dropped"),
        )
        if count
    ]
    figure.text(0.052, 1 - 0.7 / height, "   ·   ".join(facts), fontsize=10, color=_FAINT)


def _draw_rows(
    axes: Any, plan: PackingPlan, shown: Sequence[int], marked: int, pitch: float
) -> None:
    capacity, split = plan.max_length, plan.split_documents
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(len(shown) * pitch, 0)
    axes.set_axis_off()
    for row, pack in enumerate(shown):
        top = row * pitch
        runs = runs_of(plan.pieces(pack), capacity, resolution=_RESOLUTION, split=split)
        for run in runs:
            _draw_run(axes, run, capacity, top, 0.74 * pitch)
        is_marked = pack == marked
        label = {"va": "center", "fontsize": 8, "clip_on": False}
        colour, weight = (_INK, "bold") if is_marked else (_FAINT, "normal")
        middle = top + 0.37 * pitch
        axes.text(-0.9, middle, f"{pack:,}", ha="right", color=colour, weight=weight, **label)
        used = sum(run.length for run in runs if run.documents) / capacity
        # Rounded down: a pack with a free token is not full.
        words = f"{int(1000 * used) / 10:g}%" + ("  ▸" if is_marked else "")
        axes.text(_WIDTH + 0.9, middle, words, color=colour, weight=weight, **label)


def _draw_run(axes: Any, run: Run, capacity: int, top: float, height: float) -> None:
    """Draw one document, a run of short ones, or padding, as a rounded bar."""
    left, width = run.start / capacity * _WIDTH, run.length / capacity * _WIDTH
    gap = min(_GAP, width / 4)
    if run.documents == 0:
        style: dict[str, Any] = {
            "facecolor": PADDING,
            "edgecolor": _HATCH,
            "hatch": "//////",
            "linewidth": 0.0,
        }
    else:
        style = {"facecolor": PALETTE[run.shade], "linewidth": 0.0}
    axes.add_patch(_bar(left + gap, top, width - 2 * gap, height, **style))
    if run.is_part:
        notch = min(0.5, width / 3)
        axes.add_patch(
            _bar(
                left + gap,
                top + height - notch,
                width - 2 * gap,
                notch,
                facecolor=_SPLIT,
                linewidth=0.0,
            )
        )


def _bar(left: float, top: float, width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    rounding = min(_ROUND, width / 2, height / 2)
    shape = f"round,pad=0,rounding_size={rounding}"
    return FancyBboxPatch((left, top), width, height, boxstyle=shape, clip_on=False, **style)


def _draw_mask(axes: Any, lengths: Sequence[int], capacity: int, pack: int, causal: bool) -> None:
    """Draw queries downwards and keys to the right: a triangle or a square for every document."""
    from matplotlib.patches import Polygon, Rectangle

    axes.set_xlim(0, capacity)
    axes.set_ylim(capacity, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#d5dbe1")
    whole = [(0, 0), (0, capacity), (capacity, capacity)]
    if causal:
        axes.add_patch(Polygon(whole, facecolor="#f3f5f7", edgecolor="none"))
    else:
        axes.set_facecolor("#f3f5f7")
    used = sum(lengths)
    tail: dict[str, Any] = {
        "facecolor": PADDING,
        "edgecolor": _HATCH,
        "hatch": "//////",
        "linewidth": 0.0,
    }
    axes.add_patch(Rectangle((0, used), capacity, capacity - used, **tail))
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        start = end - length
        corners = [(start, start), (start, end), (end, end)]
        if not causal:
            corners.append((end, start))
        colour = PALETTE[shade_of(length, capacity)]
        edge = 0.5 if length * 100 > capacity else 0.0
        axes.add_patch(Polygon(corners, facecolor=colour, edgecolor="white", linewidth=edge))
    documents = f"{len(lengths)} document" + ("s" if len(lengths) != 1 else "")
    axes.set_title(
        f"Pack {pack:,}: who attends to whom", fontsize=11, loc="left", color=_INK, pad=8
    )
    axes.set_xlabel("key", color=_FAINT, fontsize=9)
    axes.set_ylabel("query", color=_FAINT, fontsize=9)
    axes.text(
        0.03,
        0.03 + (capacity - used) / capacity,
        "not computed",
        transform=axes.transAxes,
        fontsize=9,
        color=_FAINT,
    )
    share = attention_share(lengths, capacity)
    note = f"{documents}, each sees only itself:\n{share:.1%} of the work of one dense row" + (
        " of one document" if len(lengths) == 1 else ""
    )
    axes.text(
        0.97, 0.95, note, transform=axes.transAxes, ha="right", va="top", fontsize=9, color=_INK
    )  # fmt: skip


def _legend(figure: Any, plan: PackingPlan, height: float) -> None:
    """Name the shades, the padding and the mark of split documents, in one line at the bottom."""
    from matplotlib.patches import Patch

    ranges = shade_ranges(plan.max_length)
    handles = [
        Patch(facecolor=colour, label=f"{low:,} - {high:,}" if low < high else f"{low:,}")
        for colour, (low, high) in zip(PALETTE[-len(ranges) :], ranges, strict=True)
    ]
    handles.append(
        Patch(facecolor=PADDING, edgecolor=_HATCH, hatch="//////", label="padding", linewidth=0)
    )
    if plan.split_documents:
        handles.append(Patch(facecolor=_SPLIT, label="part of a split document"))
    legend = figure.legend(
        handles=handles, title="tokens of a document", loc="lower left", ncols=len(handles),
        bbox_to_anchor=(0.045, 0.16 / height), frameon=False, fontsize=8.5, title_fontsize=9,
        alignment="left", handlelength=1.1, handleheight=1.1, columnspacing=1.3, labelcolor=_INK,
    )  # fmt: skip
    legend.get_title().set_color(_INK)


def picture_text(plan: PackingPlan, *, packs: int = 12, width: int = 50) -> "Text":
    """Draw packs for a terminal, a line each: documents in alternating blocks, padding as dots.

    Args:
        plan: Any plan.
        packs: The most packs to draw; of a larger plan, packs at equal distances.
        width: Characters of a full pack.

    Returns:
        A `rich` text; `str()` gives it without colours.
    """
    from rich.text import Text

    shown = chosen_packs(len(plan), packs)
    margin = max((len(f"{pack:,}") for pack in shown), default=1)
    picture = Text()
    for pack in shown:
        pieces = plan.pieces(pack)
        picture.append(f"{pack:>{margin},} ", style="dim")
        picture.append_text(_line(pieces, plan, width))
        used = sum(length for _, _, length in pieces) / plan.max_length
        picture.append(f" {used:>4.0%}  {len(pieces):,} documents\n", style="dim")
    picture.append(f"{len(shown):,} of {len(plan):,} packs of {plan.max_length:,} tokens, ")
    picture.append(f"{plan.fill:.1%} full", style="bold")
    return picture


def _line(pieces: Sequence[tuple[int, int, int]], plan: PackingPlan, width: int) -> "Text":
    from rich.text import Text

    ends = list(accumulate(length for _, _, length in pieces))
    split = plan.split_documents
    line, index = Text(), 0
    for cell in range(width):
        token = (2 * cell + 1) * plan.max_length // (2 * width)
        while index < len(ends) and token >= ends[index]:
            index += 1
        if index == len(ends):
            line.append("·", style="dim")
        else:
            colour = "magenta" if pieces[index][0] in split else ("cyan", "blue")[index % 2]
            line.append("█▓"[index % 2], style=colour)
    return line
