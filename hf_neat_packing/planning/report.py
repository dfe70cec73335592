"""`PackingReport`: what a plan keeps, loses and saves, in figures, JSON, text and a picture."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from hf_neat_packing.errors import MissingDependencyError, PlanningError
from hf_neat_packing.planning.balance import balanced_order, imbalance, pack_costs
from hf_neat_packing.planning.expansion import Int64Array
from hf_neat_packing.planning.policies import Accounting, IntArray

PADDED_BATCH = 8
RANKS = 8
STEPS_PER_UPDATE = 8


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Hold the figures of one plan.

    Attributes:
        strategy: How the documents were distributed.
        seed: Of the shuffle; None for the order of arrival.
        max_length: Capacity of a pack in tokens.
        documents: Documents given.
        documents_kept: Documents in a pack, whole, cut or split.
        documents_cut: Kept documents that lost tokens to truncation.
        documents_split: Kept documents that became several pieces.
        documents_dropped: Documents in no pack: the three below together.
        dropped_overlong: Dropped because longer than `max_length`.
        dropped_short: Dropped because shorter than the minimum asked for.
        dropped_empty: Dropped because they have no tokens.
        tokens: Tokens given.
        tokens_kept: Tokens in a pack.
        tokens_cut: Tokens lost to truncation.
        tokens_dropped: Tokens of dropped documents.
        longest_document: Tokens of the longest document given.
        pieces: Documents and parts of documents in packs.
        packs: Packs in the plan.
        lower_bound: Packs that no plan of these pieces can go below.
        fill: Share of the packs' capacity that holds tokens.
        sum_squares: Sum of squared piece lengths: what attention costs inside documents.
        sum_squares_padded: The same for the pieces in padded batches of `padded_batch`.
        sum_squares_dense: The same for packs computed as one dense row each.
        padded_batch: Documents in the padded batches compared with, in order of arrival.
        ranks: Ranks of the two figures below.
        imbalance: Share of their time for which ranks wait for the slowest of a step, packs dealt
            as planned.
        imbalance_balanced: The same after `balanced_order` inside global batches.
        histogram_edges: Lengths where the histogram's bins begin, then where the last ends.
        histogram_counts: Pieces in each bin.
    """

    strategy: str
    seed: int | None
    max_length: int
    documents: int
    documents_kept: int
    documents_cut: int
    documents_split: int
    documents_dropped: int
    dropped_overlong: int
    dropped_short: int
    dropped_empty: int
    tokens: int
    tokens_kept: int
    tokens_cut: int
    tokens_dropped: int
    longest_document: int
    pieces: int
    packs: int
    lower_bound: int
    fill: float
    sum_squares: int
    sum_squares_padded: int
    sum_squares_dense: int
    padded_batch: int
    ranks: int
    imbalance: float
    imbalance_balanced: float
    histogram_edges: tuple[int, ...]
    histogram_counts: tuple[int, ...]

    @property
    def packs_above_bound(self) -> int:
        """Packs more than the lower bound; the best plan may have some of them too."""
        return self.packs - self.lower_bound

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a dictionary that JSON takes."""
        return asdict(self) | {
            "histogram_edges": list(self.histogram_edges),
            "histogram_counts": list(self.histogram_counts),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PackingReport":
        """Build a report from what `to_dict` gave.

        Raises:
            PlanningError: names are missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if names != set(data):
            raise PlanningError(
                "this is no packing report of this version: missing "
                f"{sorted(names - set(data))}, unknown {sorted(set(data) - names)}."
            )
        pairs = {key: tuple(data[key]) for key in ("histogram_edges", "histogram_counts")}
        return cls(**{**data, **pairs})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "PackingReport":
        """Read a report that `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def __str__(self) -> str:
        of_padded = _ratio(self.sum_squares, self.sum_squares_padded)
        of_dense = _ratio(self.sum_squares, self.sum_squares_dense)
        dropped = f"{self.documents_dropped:,}"
        if self.documents_dropped:
            dropped += (
                f" ({self.dropped_overlong:,} too long, {self.dropped_short:,} too short, "
                f"{self.dropped_empty:,} empty)"
            )
        seed = "order of arrival" if self.seed is None else f"seed {self.seed}"
        rows = [
            ("documents", f"{self.documents:,} (longest {self.longest_document:,} tokens)"),
            ("  kept", f"{self.documents_kept:,}"),
            ("  cut", f"{self.documents_cut:,}"),
            ("  split", f"{self.documents_split:,}"),
            ("  dropped", dropped),
            ("tokens", f"{self.tokens:,}"),
            ("  kept", f"{self.tokens_kept:,}"),
            ("  cut", f"{self.tokens_cut:,}"),
            ("  dropped", f"{self.tokens_dropped:,}"),
            ("packs", f"{self.packs:,} of {self.max_length:,} tokens ({self.strategy}, {seed})"),
            ("  fill", f"{self.fill:.2%}"),
            ("  lower bound", f"{self.lower_bound:,} ({self.packs_above_bound:+,} packs)"),
            ("attention", f"{of_padded} of padded batches of {self.padded_batch}"),
            ("", f"{of_dense} of dense rows"),
            ("waiting", f"{self.imbalance:.1%} of the time of {self.ranks} ranks, for the slowest"),
            ("", f"{self.imbalance_balanced:.1%} in balanced order"),
        ]
        return "\n".join(f"{name:<14}{value}" for name, value in rows)

    def histogram_text(self, width: int = 50) -> str:
        """Draw the histogram of piece lengths with characters.

        Args:
            width: Characters of the longest bar.
        """
        return "\n".join(
            f"{low:>9,} - {high - 1:<9,} {'█' * bar or '·' * (count > 0):<{width}} {count:,}"
            for low, high, count, bar in self._bars(width)
        )

    def _bars(self, width: int) -> list[tuple[int, int, int, int]]:
        most = max(self.histogram_counts, default=0)
        edges, counts = self.histogram_edges, self.histogram_counts
        return [
            (low, high, count, round(width * count / most) if most else 0)
            for low, high, count in zip(edges, edges[1:], counts, strict=False)
        ]

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the histogram of piece lengths into a file.

        Args:
            path: PNG, SVG or PDF, by its suffix.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError(
                "a picture of the report needs matplotlib: pip install 'hf-neat-packing[plot]'. "
                "histogram_text() draws it in the terminal without."
            ) from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        bars = self._bars(1)
        labels = [f"{low:,} - {high - 1:,}" for low, high, _, _ in bars]
        axes.bar(range(len(bars)), [count for _, _, count, _ in bars], width=0.9)
        axes.set_xticks(range(len(bars)), labels, rotation=45, ha="right")
        axes.set_xlabel("tokens")
        axes.set_ylabel("documents" if self.pieces == self.documents_kept else "pieces")
        axes.set_title(
            f"{self.documents_kept:,} documents in {self.packs:,} packs of {self.max_length:,}, "
            f"{self.fill:.1%} full"
        )
        figure.savefig(path)


def report_on(
    *,
    indices: IntArray,
    offsets: Int64Array,
    lengths: IntArray,
    starts: Int64Array | None,
    max_length: int,
    strategy: str,
    seed: int | None,
    lower_bound: int,
    accounting: Accounting,
) -> PackingReport:
    """Compute the report of a plan from its arrays (see `PackingPlan` for their meaning)."""
    packs = len(offsets) - 1
    costs = pack_costs(lengths, offsets)
    balanced = balanced_order(costs, RANKS, steps_per_update=STEPS_PER_UPDATE)
    edges, counts = _histogram(lengths)
    arrival = np.argsort(indices) if starts is None else np.lexsort((starts, indices))
    return PackingReport(
        strategy=strategy,
        seed=seed,
        max_length=max_length,
        documents=accounting.documents,
        documents_kept=accounting.documents_kept,
        documents_cut=accounting.documents_cut,
        documents_split=accounting.documents_split,
        documents_dropped=accounting.documents_dropped,
        dropped_overlong=accounting.dropped_overlong,
        dropped_short=accounting.dropped_short,
        dropped_empty=accounting.dropped_empty,
        tokens=accounting.tokens,
        tokens_kept=accounting.tokens_kept,
        tokens_cut=accounting.tokens_cut,
        tokens_dropped=accounting.tokens_dropped,
        longest_document=accounting.longest,
        pieces=len(lengths),
        packs=packs,
        lower_bound=lower_bound,
        fill=accounting.tokens_kept / (packs * max_length) if packs else 0.0,
        sum_squares=sum_of_squares(lengths),
        sum_squares_padded=_padded_squares(lengths[arrival]),
        sum_squares_dense=packs * max_length**2,
        padded_batch=PADDED_BATCH,
        ranks=RANKS,
        imbalance=imbalance(costs, RANKS),
        imbalance_balanced=imbalance(costs[balanced], RANKS),
        histogram_edges=edges,
        histogram_counts=counts,
    )


def sum_of_squares(lengths: IntArray) -> int:
    """Sum squared lengths exactly, as a Python integer.

    Args:
        lengths: int `[pieces]`, tokens.
    """
    if len(lengths) and int(lengths.max()) ** 2 > (2**63 - 1) // len(lengths):
        return sum(length * length for length in lengths.tolist())
    wide = lengths.astype(np.int64)
    return int(np.dot(wide, wide))


def _padded_squares(lengths: IntArray) -> int:
    """Sum of squares when batches of `PADDED_BATCH` are padded to their longest document."""
    if not len(lengths):
        return 0
    first = np.arange(0, len(lengths), PADDED_BATCH)
    longest = np.maximum.reduceat(lengths, first)
    last = len(lengths) - int(first[-1])
    return PADDED_BATCH * sum_of_squares(longest[:-1]) + last * int(longest[-1]) ** 2


def _histogram(lengths: IntArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count lengths between powers of two."""
    if not len(lengths):
        return (), ()
    low, high = int(lengths.min()).bit_length() - 1, int(lengths.max()).bit_length()
    edges = tuple(2**power for power in range(low, high + 1))
    counts, _ = np.histogram(lengths, bins=(*edges[:-1], edges[-1] - 0.5))
    return edges, tuple(counts.tolist())


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
