"""What the demonstration shows, as rich renderables that fit 80 columns."""

import string
from collections.abc import Sequence
from itertools import accumulate

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hf_neat_packing.demo.exactness import Isolation
from hf_neat_packing.demo.run import Checked, Compared, Event, Planned, Said, Saved
from hf_neat_packing.demo.training import Training

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_LETTERS = string.ascii_letters
_STRIP_WIDTH = 74
_SQUARE = 36
_BARS = "▁▂▃▄▅▆▇█"


def picture_of(event: Event) -> RenderableType:
    """Draw what happened in one phase.

    Args:
        event: What `run_demo` yields.
    """
    match event:
        case Said(topic="", text=text):
            return Text(f"  {text}")
        case Said(topic=topic, text=text):
            return Text.assemble("\n", (topic, "bold"), f"  {text}")
        case Planned():
            return _plan(event)
        case Training():
            return _training(event)
        case Compared():
            return _speeds(event)
        case Checked():
            return _exactness(event)
        case Saved():
            return _saved(event)


def _rows(pairs: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row(Text(name, style="dim"), value)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _plan(event: Planned) -> RenderableType:
    report = event.report
    policies = (
        (report.documents_split, "split"),
        (report.documents_cut, "cut"),
        (report.documents_dropped, "dropped"),
    )
    treated = ", ".join(f"{count:,} {what}" for count, what in policies if count)
    documents = (
        f"{report.documents:,}, {report.tokens:,} tokens, longest {report.longest_document:,}"
    )
    squares = sum(length**2 for length in event.pack_lengths)
    used = sum(event.pack_lengths)
    return Group(
        Text.assemble("\n", ("Plan", "bold"), "  which documents share a pack"),
        _rows(
            [
                ("documents", documents + (f", {treated}" if treated else "")),
                ("packs", f"{report.packs:,} of {report.max_length:,} tokens"),
                ("fill", f"{report.fill:.2%}"),
                ("lower bound", f"{report.lower_bound:,} packs; no plan can need fewer"),
            ]
        ),
        Text.assemble(
            "\n", ("One pack", "bold"), f"  {len(event.pack_lengths)} documents, {used:,} tokens\n"
        ),
        Padding(strip(event.pack_lengths, report.max_length), (0, 0, 0, 2), expand=False),
        Text("\n  and who attends to whom: each token to the earlier ones of its document"),
        Padding(
            Panel.fit(block_diagonal(event.pack_lengths), box=box.SQUARE, border_style="dim"),
            (0, 0, 0, 2),
            expand=False,
        ),
        Text(
            f"  {squares / used**2:.1%} of the square: what attention has to compute, and all it does"
        ),
    )


def strip(lengths: Sequence[int], capacity: int, *, lines: int = 3) -> Text:
    """Draw a pack as letters, one run per document, as long as its share of the pack.

    Args:
        lengths: Tokens of each document, in order.
        capacity: Tokens of a full pack; what is free shows as dots.
        lines: Lines of the picture.
    """
    cells = lines * _STRIP_WIDTH
    ends = list(accumulate(lengths))
    picture = Text()
    document = 0
    for cell in range(cells):
        token = (2 * cell + 1) * capacity // (2 * cells)
        while document < len(ends) and token >= ends[document]:
            document += 1
        if cell and cell % _STRIP_WIDTH == 0:
            picture.append("\n")
        if document == len(ends):
            picture.append("·", style="dim")
        else:
            colour = _COLOURS[document % len(_COLOURS)]
            picture.append(_LETTERS[document % len(_LETTERS)], style=f"bold {colour}")
    return picture


def block_diagonal(lengths: Sequence[int]) -> Text:
    """Draw the attention of a pack: queries downwards, keys to the right, two rows to a character.

    Args:
        lengths: Tokens of each document, in order.
    """
    total = sum(lengths)
    ends = list(accumulate(lengths))
    owner: list[int] = []
    for cell in range(_SQUARE):
        token = (2 * cell + 1) * total // (2 * _SQUARE)
        owner.append(next(index for index, end in enumerate(ends) if token < end))
    picture = Text()
    for upper in range(0, _SQUARE, 2):
        for key in range(_SQUARE):
            above, below = (
                key <= query and owner[key] == owner[query] for query in (upper, upper + 1)
            )
            character = "█" if above and below else "▀" if above else "▄" if below else " "
            picture.append(character, style=_COLOURS[owner[key] % len(_COLOURS)])
        if upper + 2 < _SQUARE:
            picture.append("\n")
    return picture


def _training(event: Training) -> RenderableType:
    return _rows(
        [
            ("loss", f"{event.start:.2f} at the start, {event.end:.2f} at the end"),
            ("", f"{sparkline(event.losses)}"),
            ("time", f"{event.seconds:.0f} s for {event.tokens:,} real tokens"),
        ]
    )


def sparkline(values: Sequence[float], *, width: int = 60) -> str:
    """Draw values as bars of one line, the highest as a full block.

    Args:
        values: Any finite numbers.
        width: The most characters.
    """
    step = max(1, -(-len(values) // width))
    means = [
        sum(part) / len(part)
        for part in (values[first : first + step] for first in range(0, len(values), step))
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in means)


def _speeds(event: Compared) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("tokens computed", "real tokens/s", "loss", "neat_varlen is"):
        table.add_column(name, justify="right")
    ours = event.speeds[0].tokens_per_second
    for speed in event.speeds:
        ratio = ours / speed.tokens_per_second
        table.add_row(
            speed.name,
            f"{speed.computed_tokens:,}",
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.loss:.4f}",
            "" if speed is event.speeds[0] else f"{ratio:.1f}x as fast",
        )
    return Padding(table, (0, 0, 0, 2), expand=False)


def _exactness(event: Checked) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("neat_varlen")
    table.add_column("control: one causal row")
    packed, control = event.packed, event.control
    table.add_row(
        "a document replaced: largest change\nof any other document's logits",
        _effect(packed.logits_moved),
        _effect(control.logits_moved),
    )
    table.add_row(
        "a document's loss: largest gradient\nby any other document's tokens",
        _effect(packed.gradient_leaked),
        _effect(control.gradient_leaked),
    )
    return Group(
        Padding(table, (0, 0, 0, 2), expand=False),
        Padding(_verdict(packed, control), (0, 0, 0, 2), expand=False),
    )


def _effect(value: float) -> str:
    return "exactly 0" if value == 0.0 else f"{value:.1e}"


def _verdict(packed: Isolation, control: Isolation) -> Text:
    if control.exact:
        return Text("The control did not fail, so this check proves nothing.", style="bold red")
    if packed.exact:
        return Text("Exact: no bit passes between documents. The control fails.", style="green")
    return Text("NOT EXACT: documents of this pack change each other.", style="bold red")


def _saved(event: Saved) -> RenderableType:
    if event.same_logits:
        verdict = Text("read back, it gives the same logits, bit for bit", style="green")
    else:
        verdict = Text("READ BACK, ITS LOGITS DIFFER", style="bold red")
    folder = Text(f"  {event.folder}", overflow="fold")
    return Group(Text.assemble("  ", verdict), folder)
