"""`PackingPlan`: which documents share a pack, as a few integers a document."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning.bound import classes_lower_bound, length_classes
from hf_neat_packing.planning.policies import Accounting, IntArray
from hf_neat_packing.planning.report import PackingReport, report_on

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackingPlan:
    """Say which documents, or pieces of documents, go into which pack.

    Pack p holds pieces `offsets[p]` to `offsets[p + 1]`. The arrays are read-only. Two plans are
    equal when all their values are.

    Attributes:
        indices: int32 `[pieces]`, document of each piece, pack after pack.
        offsets: int64 `[packs + 1]`, first piece of each pack, then the number of pieces.
        lengths: int32 `[pieces]`, tokens of each piece (int64 if `max_length` needs it).
        starts: int64 `[pieces]`, first token of each piece in its document; None when every piece
            starts at its document's first token.
        max_length: Capacity of a pack in tokens.
        strategy: How the documents were distributed.
        seed: Of the shuffle; None for the order of arrival.
        num_documents: Documents given, those that are in no pack included.
        accounting: What was kept, cut, split and dropped.
    """

    indices: npt.NDArray[np.int32]
    offsets: Int64Array
    lengths: IntArray
    starts: Int64Array | None
    max_length: int
    strategy: str
    seed: int | None
    num_documents: int
    accounting: Accounting

    def __post_init__(self) -> None:
        for array in (self.indices, self.offsets, self.lengths, self.starts):
            if array is not None:
                array.flags.writeable = False

    def __len__(self) -> int:
        """Packs in the plan."""
        return len(self.offsets) - 1

    def pieces(self, pack: int) -> list[tuple[int, int, int]]:
        """List what is in a pack, in order.

        Args:
            pack: Index of the pack; negative counts from the end.

        Returns:
            `(document, start, length)` of each piece, in tokens.

        Raises:
            IndexError: there is no such pack.
        """
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of a plan of {len(self)} packs")
        pack %= len(self)
        chosen = slice(int(self.offsets[pack]), int(self.offsets[pack + 1]))
        lengths = self.lengths[chosen].tolist()
        starts = [0] * len(lengths) if self.starts is None else self.starts[chosen].tolist()
        return list(zip(self.indices[chosen].tolist(), starts, lengths, strict=True))

    @property
    def pack_lengths(self) -> Int64Array:
        """Tokens of each pack, int64 `[packs]`."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.lengths, self.offsets[:-1], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens in all packs."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds tokens, 0 to 1; 0.0 for a plan of no packs."""
        return self.num_tokens / (len(self) * self.max_length) if len(self) else 0.0

    @cached_property
    def lower_bound(self) -> int:
        """A number of packs that no plan of these pieces can go below."""
        classes = length_classes(self.lengths, self.max_length)
        return classes_lower_bound(classes, self.max_length)

    @property
    def split_documents(self) -> frozenset[int]:
        """Documents that became several pieces."""
        if self.starts is None:
            return frozenset()
        documents, pieces = np.unique(self.indices, return_counts=True)
        return frozenset(documents[pieces > 1].tolist())

    @property
    def report(self) -> PackingReport:
        """The figures of this plan, computed when asked for."""
        return report_on(
            indices=self.indices,
            offsets=self.offsets,
            lengths=self.lengths,
            starts=self.starts,
            max_length=self.max_length,
            strategy=self.strategy,
            seed=self.seed,
            lower_bound=self.lower_bound,
            accounting=self.accounting,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackingPlan):
            return NotImplemented
        return self._scalars() == other._scalars() and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self._arrays(), other._arrays(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by value

    def _scalars(self) -> tuple[object, ...]:
        return (
            self.max_length,
            self.strategy,
            self.seed,
            self.num_documents,
            self.accounting,
            self.starts is None,
        )

    def _arrays(self) -> tuple[IntArray, ...]:
        starts = self.offsets[:0] if self.starts is None else self.starts
        return self.indices, self.offsets, self.lengths, starts

    def _repr_html_(self) -> str:
        from hf_neat_packing.planning.html import plan_html

        return plan_html(self)

    def __repr__(self) -> str:
        lost = self.accounting.tokens - self.accounting.tokens_kept
        return (
            f"PackingPlan({self.num_documents:,} documents -> {len(self):,} packs of "
            f"{self.max_length:,} tokens, {self.strategy}, {self.fill:.2%} full, "
            f"lower bound {self.lower_bound:,}" + (f", {lost:,} tokens lost)" if lost else ")")
        )
