"""Best fit over a bounded look-ahead: the planner for streams and for packs of chance composition.

Documents go into packs in the order of arrival while they fit; only the end of a pack is chosen.
That keeps in every pack the mixture of lengths that the stream has, which a plan that sorts by
length destroys, and still closes nearly every pack exactly.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning.bound import as_capacity
from hf_neat_packing.planning.decreasing import plan_decreasing
from hf_neat_packing.planning.expansion import Packs
from hf_neat_packing.planning.policies import IntArray

# At the end of a stream the last packs' worth of documents are planned at once.
LAST_PACKS = 4
# Lengths tried as the shorter of a pair that closes a pack exactly.
PAIR_TRIES = 16
STATE_VERSION = 2


class PoolPacker:
    """Pack a stream of documents, looking ahead a bounded way.

    The pool is ready to give a pack when it holds at least `look_ahead` documents and at least
    `packs_ahead` packs' worth of tokens (a pool of many short documents may not fill one pack).
    What it gives depends only on the documents held and their order, so a packer restored from
    `state_dict()` continues with the same packs.

    Args:
        max_length: Capacity of a pack in tokens.
        look_ahead: Documents to hold before a pack is given.
        packs_ahead: Tokens to hold before a pack is given, in packs; 0 makes `look_ahead` a strict
            bound on the documents held.

    Example:
        >>> packer = PoolPacker(8, look_ahead=3, packs_ahead=0)
        >>> list(packer.feed([(0, 5), (1, 6), (2, 3)]))
        [[0, 2]]
        >>> list(packer.flush())
        [[1]]
    """

    def __init__(self, max_length: int, *, look_ahead: int = 128, packs_ahead: int = 3):
        self.max_length = as_capacity(max_length)
        if look_ahead < 1 or packs_ahead < 0:
            raise PlanningError(
                f"look_ahead={look_ahead}, packs_ahead={packs_ahead}; a packer holds at least one "
                "document, and packs_ahead is 0 or more."
            )
        self.look_ahead = int(look_ahead)
        self.packs_ahead = int(packs_ahead)
        self._clear()

    def _clear(self) -> None:
        # An arrival is [document, length]; its length becomes 0 when it is taken out of turn.
        self._arrivals: deque[list[int]] = deque()
        self._by_length: dict[int, deque[list[int]]] = {}
        self._lengths: list[int] = []  # the keys of `_by_length`, sorted
        self._documents = 0
        self._tokens = 0
        # Documents in each of the packs that `flush` has planned, in the order of the arrivals.
        self._last: deque[int] = deque()

    def __len__(self) -> int:
        """Documents held."""
        return self._documents

    @property
    def tokens(self) -> int:
        """Tokens of the documents held."""
        return self._tokens

    @property
    def ready(self) -> bool:
        """Whether enough is held for `pop` to choose well."""
        return (
            self._documents >= self.look_ahead
            and self._tokens >= self.packs_ahead * self.max_length
        )

    def push(self, document: int, length: int) -> None:
        """Take in the next document of the stream.

        Args:
            document: Any integer that names it; packs are lists of these.
            length: Its tokens, 1 to `max_length`.

        Raises:
            PlanningError: the length is outside that range.
        """
        if not 1 <= length <= self.max_length:
            raise PlanningError(
                f"document {document} has {length} tokens; a packer takes 1 to "
                f"max_length={self.max_length}. Cut, split or drop it before."
            )
        arrival = [document, length]
        held = self._by_length.get(length)
        if held is None:
            self._by_length[length] = deque((arrival,))
            insort(self._lengths, length)
        else:
            held.append(arrival)
        self._arrivals.append(arrival)
        if self._last:
            self._last.clear()
        self._documents += 1
        self._tokens += length

    def pop(self) -> list[int]:
        """Give one pack of the documents held: the oldest first, its end filled from the rest.

        Returns:
            The documents in the pack; empty if none is held.
        """
        room = self.max_length
        near = room // 1000
        pack: list[int] = []
        self._last.clear()
        arrivals, by_length, lengths = self._arrivals, self._by_length, self._lengths
        while arrivals:
            document, length = arrivals[0]
            if length > room:
                break
            arrivals.popleft()
            if not length:
                continue
            self._take(length)
            pack.append(document)
            room -= length
            if not room or room in by_length:
                break
        while room and (at := bisect_right(lengths, room)):
            longest = lengths[at - 1]
            pair = self._pair(room) if room - longest > near else ()
            for length in pair or (longest,):
                arrival = self._take(length)
                arrival[1] = 0
                pack.append(arrival[0])
                room -= length
        self._documents -= len(pack)
        self._tokens -= self.max_length - room
        return pack

    def _take(self, length: int) -> list[int]:
        """Remove the oldest arrival of `length` from the choice."""
        held = self._by_length[length]
        arrival = held.popleft()
        if not held:
            del self._by_length[length], self._lengths[bisect_left(self._lengths, length)]
        return arrival

    def _pair(self, room: int) -> tuple[int, ...]:
        """Return two lengths held that sum to `room`, near one another, if a short search finds any."""
        lengths, by_length = self._lengths, self._by_length
        half = bisect_right(lengths, room >> 1)
        for at in range(half - 1, max(-1, half - 1 - PAIR_TRIES), -1):
            short = lengths[at]
            if room - short in by_length and (2 * short != room or len(by_length[short]) > 1):
                return room - short, short
        return ()

    def feed(self, documents: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        """Push `(document, length)` pairs and yield packs as soon as the packer is ready."""
        look_ahead, low = self.look_ahead, self.packs_ahead * self.max_length
        push, pop = self.push, self.pop
        for document, length in documents:
            push(document, length)
            while self._documents >= look_ahead and self._tokens >= low:
                yield pop()

    def flush(self) -> Iterator[list[int]]:
        """Yield packs until nothing is held; what is not yielded yet is held, and in the state."""
        while self._tokens > LAST_PACKS * self.max_length:
            yield self.pop()
        while self._documents:
            if not self._last:
                self._plan_last()
            pack = [self._arrivals.popleft() for _ in range(self._last.popleft())]
            for _, length in pack:
                self._take(length)
                self._tokens -= length
            self._documents -= len(pack)
            yield [document for document, _ in pack]

    def _plan_last(self) -> None:
        """Plan all that is held at once, and hold it in the order of that plan."""
        held = [arrival for arrival in self._arrivals if arrival[1]]
        lengths = np.array([length for _, length in held], dtype=np.int64)
        packs = plan_decreasing(lengths, self.max_length, None)
        self._clear()
        for position in packs.order.tolist():
            self.push(*held[position])
        self._last.extend(np.diff(packs.offsets).tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next packs depend on, as plain integers and lists."""
        held = [arrival for arrival in self._arrivals if arrival[1]]
        return {
            "version": STATE_VERSION,
            "max_length": self.max_length,
            "look_ahead": self.look_ahead,
            "packs_ahead": self.packs_ahead,
            "documents": [document for document, _ in held],
            "lengths": [length for _, length in held],
            "last": list(self._last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the packer that gave `state` stood.

        Raises:
            PlanningError: the state is of a packer with other settings.
        """
        own = {"version": STATE_VERSION} | {
            name: getattr(self, name) for name in ("max_length", "look_ahead", "packs_ahead")
        }
        other = {name: state.get(name) for name in own}
        if own != other:
            raise PlanningError(
                f"the state is of a packer with {other} and this one has {own}; its packs would "
                "not be the same. Build the packer with the settings of the state."
            )
        self._clear()
        for document, length in zip(state["documents"], state["lengths"], strict=True):
            self.push(document, length)
        self._last.extend(state["last"])


def plan_pool(lengths: IntArray, max_length: int, *, look_ahead: int = 1024) -> Packs:
    """Pack pieces in order of arrival with a `PoolPacker`.

    Args:
        lengths: int32 or int64 `[pieces]`, 1 to `max_length` tokens.
        max_length: Capacity of a pack in tokens.
        look_ahead: Pieces to hold before a pack is closed.
    """
    packer = PoolPacker(max_length, look_ahead=look_ahead)
    placed: list[int] = []
    offsets = [0]
    for pack in chain(packer.feed(enumerate(lengths.tolist())), packer.flush()):
        placed += pack
        offsets.append(len(placed))
    order = np.array(placed, dtype=np.int32)
    return Packs(order, lengths[order], np.array(offsets, dtype=np.int64))
