"""One attention call over a flat stream of documents: what every kernel is given.

Legend: `T` tokens, `H` query heads, `K` key heads (`H % K == 0`), `D` query and key head dim,
`V` value head dim, `L` tokens of one document.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

DocumentMask = Callable[[int, int], Tensor]
"""Gives the mask of the tokens `start:stop` among themselves, `[1, 1 or H, L, L]`: bool (True = may
attend) or additive."""


class VarlenCall(NamedTuple):
    """Block-diagonal attention over documents that lie end to end.

    Attributes:
        query: `[T, H, D]`.
        key: `[T, K, D]`.
        value: `[T, K, V]`.
        cu_seqlens: int32 `[N+1]` on the device of the query, from 0 to `T`, strictly increasing; on
            an accelerator the last one may be repeated.
        max_seqlen: tokens of the longest document.
        lengths: the document lengths on the host, or None where reading them would cost a
            synchronisation (accelerators).
        left: keys that a query sees before itself (None: back to the document's start).
        right: keys that a query sees after itself (None: to the document's end; 0: causal).
        scale: factor on the scores; None means `D ** -0.5`.
        dropout: probability with which an attention weight is zeroed.
        softcap: scores become `softcap * tanh(scores / softcap)`, or None.
        sinks: `[H]`, or `[T, H]` with one for every query: a score that takes part in the softmax and
            has no value. Or None.
        mask: the mask of a document where `left` and `right` cannot say it, or None. It holds the
            whole truth inside the document: `left` and `right` are then None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None
    left: int | None = None
    right: int | None = 0
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    mask: DocumentMask | None = None

    def host_lengths(self) -> tuple[int, ...]:
        """Return the document lengths, copying them to the host where that is still to be done."""
        if self.lengths is not None:
            return self.lengths
        offsets = self.cu_seqlens.tolist()
        # Offsets of a fixed size repeat the last one: documents without a token.
        return tuple(stop - start for start, stop in itertools.pairwise(offsets) if stop > start)
