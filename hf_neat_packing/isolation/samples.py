"""What is tried and what is found: documents laid into rows, and the verdict on a forward of them.

Legend: `B` rows, `S` tokens in a row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Sample(NamedTuple):
    """Documents laid into rows.

    Attributes:
        rows: token ids of each document, by row.
        document_map: int64 `[B, S]`.
    """

    rows: tuple[tuple[Tensor, ...], ...]
    document_map: Tensor

    def documents(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Walk the documents: row, place in it, token ids."""
        for number, row in enumerate(self.rows):
            start = 0
            for document in row:
                yield number, slice(start, start + len(document)), document
                start += len(document)


class Verdict(NamedTuple):
    """What a packed forward did with the documents.

    Attributes:
        error: the largest difference from a document alone, relative to the largest value.
        moved: the largest relative change of a document when the others were exchanged.
        raised: the exception of a forward that raised, or None.
        reached: whether what moved is more than rounding, however little it is: a gradient crosses.
    """

    error: float
    moved: float
    raised: Exception | None = None
    reached: bool = False

    def __str__(self) -> str:
        if self.raised is not None:
            return f"raises {type(self.raised).__name__}: {self.raised}"
        return (
            f"computes documents {self.error:.1g} away from the same documents alone, and moves them by "
            f"{self.moved:.1g} when their neighbours change"
            + (", with a gradient that crosses" if self.reached else "")
        )

    def or_worse(self, other: "Verdict") -> "Verdict":
        """Combine with another verdict: the larger of each number, and the first exception."""
        return Verdict(
            max(self.error, other.error),
            max(self.moved, other.moved),
            self.raised or other.raised,
            self.reached or other.reached,
        )


@contextmanager
def leaf_embeddings(model: nn.Module) -> Iterator[list[Tensor]]:
    """Make the token embeddings of one forward leaves, to ask for gradients with respect to them."""
    leaves: list[Tensor] = []

    def to_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = model.get_input_embeddings().register_forward_hook(to_leaf)  # type: ignore[operator]
    try:
        yield leaves
    finally:
        handle.remove()
