"""Which documents share one SDPA call: like lengths together, padding bounded by the cost of a call.

A call costs a fixed overhead and then grows with the square of the width. Thousands of short
documents would drown in overhead if each had a call of its own; so short documents are padded on the
right to a common width, as long as the wasted squares stay below what one more call would cost.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# One forward and backward call costs about as much as this many score elements of all heads (measured
# on CPU: 0.1 to 0.2 ms a call, about 10 ns a score element and head); only the order of magnitude matters.
CALL_OVERHEAD = 16_384

# Above this width a call is dominated by its own squares, and copying the tokens into a bucket only costs.
LONGEST_SHARED = 256


class Bucket(NamedTuple):
    """Documents of one shared call: their numbers and the width that they are padded to."""

    documents: tuple[int, ...]
    width: int


class Regroup(NamedTuple):
    """Where the tokens of the shared documents lie in the buckets.

    Attributes:
        alone: numbers of the documents that get a call of their own.
        buckets: the shared calls, widest first.
        stretches: for every piece of the stream in order, `(tokens, document or None)`: a document
            with its own call, or a stretch of neighbouring shared documents.
        source: int64 `[slots]`, the short-stream token that a bucket slot copies (padding slots
            repeat the last token of their document, whose value never matters).
        slot: int64 `[short tokens]`, the bucket slot of each token of the short stream.
        in_order: whether the short stream already lies as the buckets want it.
    """

    alone: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    stretches: tuple[tuple[int, int | None], ...]
    source: Tensor
    slot: Tensor
    in_order: bool


@lru_cache(maxsize=64)
def share_calls(lengths: tuple[int, ...], num_heads: int) -> Regroup:
    """Decide which documents share a call. Depends on nothing but the numbers; every layer asks again.

    Args:
        lengths: document lengths in stream order.
        num_heads: query heads; the overhead of a call weighs less the more heads it has.
    """
    short = [n for n, length in enumerate(lengths) if length <= LONGEST_SHARED]
    if len(short) < 2:
        short = []
    shared = set(short)
    buckets = _fill_buckets(lengths, short, max(1, CALL_OVERHEAD // num_heads))
    stretches: list[tuple[int, int | None]] = []
    for number, length in enumerate(lengths):
        if number not in shared:
            stretches.append((length, number))
        elif stretches and stretches[-1][1] is None:
            stretches[-1] = (stretches[-1][0] + length, None)
        else:
            stretches.append((length, None))
    alone = tuple(n for n in range(len(lengths)) if n not in shared)
    source, slot = _slots(lengths, short, buckets)
    in_order = source.numel() == slot.numel() and bool((slot.diff() == 1).all())
    return Regroup(alone, tuple(buckets), tuple(stretches), source, slot, in_order)


def _fill_buckets(lengths: tuple[int, ...], short: list[int], overhead: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    members: list[int] = []
    width = waste = 0
    for number in sorted(short, key=lambda n: -lengths[n]):
        more = width**2 - lengths[number] ** 2
        if members and waste + more > overhead:
            buckets.append(Bucket(tuple(members), width))
            members, waste = [], 0
        if not members:
            width, more = lengths[number], 0
        members.append(number)
        waste += more
    if members:
        buckets.append(Bucket(tuple(members), width))
    return buckets


def _slots(
    lengths: tuple[int, ...], short: list[int], buckets: list[Bucket]
) -> tuple[Tensor, Tensor]:
    """Lay the short stream (short documents end to end) into the buckets."""
    order = [n for bucket in buckets for n in bucket.documents]
    if not order:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    all_lengths = torch.tensor(lengths)
    short_lengths = all_lengths[short]
    start_of = torch.zeros(len(lengths), dtype=torch.int64)
    start_of[short] = short_lengths.cumsum(0) - short_lengths
    length = all_lengths[order]
    width = torch.repeat_interleave(
        torch.tensor([bucket.width for bucket in buckets]),
        torch.tensor([len(bucket.documents) for bucket in buckets]),
    )
    first_slot = width.cumsum(0) - width
    within = torch.arange(int(width.sum())) - torch.repeat_interleave(first_slot, width)
    real = within < torch.repeat_interleave(length, width)
    last = torch.repeat_interleave(length - 1, width)
    source = torch.repeat_interleave(start_of[order], width) + torch.minimum(within, last)
    slot = torch.empty(int(short_lengths.sum()), dtype=torch.int64)
    slot[source[real]] = real.nonzero().squeeze(1)
    return source, slot
