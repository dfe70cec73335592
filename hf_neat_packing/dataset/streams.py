"""Pack documents as they stream by, with a bounded buffer, and resume exactly where a run stopped.

A stream is packed by the same look-ahead pool as a data set: documents go into packs in the order
of arrival, and the end of each pack is chosen from the documents held. What is held travels in
`state_dict()`, so a run that was killed continues with the very packs that it would have made.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from operator import itemgetter
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.dataset.stream_documents import (
    DocumentCutter,
    decode_document,
    encode_document,
)
from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import Accounting, OnEmpty, OnOverlong, PoolPacker, TruncateSide

Document = Mapping[str, Any]
_STATE_VERSION = 1


def pack_stream(
    iterable: Iterable[Mapping[str, Any]],
    *,
    max_length: int,
    buffer: int = 4096,
    on_overlong: OnOverlong = "error",
    truncate_side: TruncateSide = "right",
    min_length: int = 0,
    on_empty: OnEmpty = "drop",
    columns: Mapping[str, ColumnRule | str] | None = None,
) -> "PackedStream":
    """Pack any iterable of documents into rows of at most `max_length` tokens, as they come.

    Args:
        iterable: Documents as mappings from column to value: a `datasets.IterableDataset`, also
            one that `split_dataset_by_node` gave to this rank, or any other iterable.
        max_length: The most tokens in a pack.
        buffer: Documents to read ahead; more only where they do not fill one pack. 1,000 are
            enough for packs that are full to 0.1 %.
        on_overlong: What becomes of a document longer than `max_length`: `error`, `truncate`,
            `split` or `drop`.
        truncate_side: The side that `truncate` cuts, `right` or `left`.
        min_length: Documents with fewer tokens are dropped, and counted.
        on_empty: `drop` (and count) empty documents, or `error`.
        columns: Rules by column name, for names that `DEFAULT_COLUMN_RULES` does not know.

    Returns:
        An iterable of packs: nested columns, one inner value per document, as the source gave it.

    Example:
        >>> stream = pack_stream([{"input_ids": [1, 2]}, {"input_ids": [3]}], max_length=4)
        >>> list(stream)
        [{'input_ids': [[1, 2], [3]]}]
    """
    cutter = DocumentCutter(
        max_length,
        on_overlong=on_overlong,
        truncate_side=truncate_side,
        min_length=min_length,
        on_empty=on_empty,
        columns=columns,
    )
    return PackedStream(iterable, cutter, buffer=buffer)


class PackedStream(IterableDataset[dict[str, list[Any]]]):
    """Iterate over packs of a stream of documents; `pack_stream` makes one.

    In a `DataLoader` with workers, each worker packs its own documents: the shards that a
    `datasets.IterableDataset` gives it, or every n-th document of a plain iterable. State inside
    workers is out of reach of a plain `DataLoader`: use torchdata's `StatefulDataLoader`, or no
    workers, where a run must be resumed.

    Args:
        source: The documents.
        cutter: What becomes of each document before it is packed.
        buffer: Documents to read ahead.
    """

    def __init__(
        self, source: Iterable[Mapping[str, Any]], cutter: DocumentCutter, *, buffer: int
    ) -> None:
        self.source = source
        self.cutter = cutter
        self.buffer = buffer
        self._initial = self._source_state()
        self._source_moved = False
        self._loaded: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        """Hold nothing, having read nothing."""
        # One pack's worth is the floor: fewer documents than fill a pack would leave it half empty.
        self._packer = PoolPacker(self.cutter.max_length, look_ahead=self.buffer, packs_ahead=1)
        self._held: dict[int, Document] = {}
        self._last: deque[list[int]] | None = None
        self._read = 0
        self._pieces = 0
        self.cutter.reset()

    @property
    def accounting(self) -> Accounting:
        """What became of every document and token that this iteration has read."""
        return self.cutter.accounting()

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        documents = self._open_source()
        while self._last is None:
            if self._fill(documents):
                yield self._join(self._packer.pop())
            else:
                self._last = deque(self._packer.flush())
        while self._last:
            yield self._join(self._last.popleft())

    def _fill(self, documents: Iterator[Mapping[str, Any]]) -> bool:
        """Read documents until a pack can be chosen well; say whether one can."""
        packer, held, cutter = self._packer, self._held, self.cutter
        shortest, longest, buffer = cutter.shortest, cutter.max_length, self.buffer
        if len(held) >= buffer and packer.ready:
            return True
        for document in documents:
            length = cutter.measure(document, self._read)
            kept = cutter.keep(document)
            if shortest <= length <= longest:
                packer.push(self._pieces, length)
                held[self._pieces] = kept
                self._pieces += 1
            else:
                for piece, tokens in cutter.cut(kept, length, self._read):
                    packer.push(self._pieces, tokens)
                    held[self._pieces] = piece
                    self._pieces += 1
            self._read += 1
            if len(held) >= buffer and packer.ready:
                return True
        return False

    def _open_source(self) -> Iterator[Mapping[str, Any]]:
        """Open the source at its beginning, or where the loaded state stood."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self._start()
            if self._source_moved:
                # A datasets.IterableDataset would otherwise begin at the loaded place again.
                self._load_source(self._initial)
                self._source_moved = False
            return self._iterate()
        self._restore(loaded)
        if loaded["source"] is not None:
            self._load_source(loaded["source"])
            self._source_moved = True
            return self._iterate()
        documents = self._iterate()
        skipped = sum(1 for _ in islice(documents, self._read))
        if skipped < self._read:
            raise PlanningError(
                f"The state was saved after {self._read} documents and the iterable has only "
                f"{skipped}, so it is not the one that was packed. Accepted: an iterable that "
                "gives the same documents from its beginning."
            )
        return documents

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over this worker's documents."""
        documents = iter(self.source)
        worker = get_worker_info()
        if worker is None or isinstance(self.source, IterableDataset):
            return documents  # an IterableDataset divides itself among workers
        return islice(documents, worker.id, None, worker.num_workers)

    def _join(self, pieces: list[int]) -> dict[str, list[Any]]:
        """Take pieces out of what is held and make one pack of them."""
        documents = [self._held.pop(piece) for piece in pieces]
        return {name: list(map(itemgetter(name), documents)) for name in documents[0]}

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the source, which shuffles by it if it can."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def _epoch(self) -> int | None:
        """Return the epoch of the source, if it has one."""
        epoch = getattr(self.source, "epoch", None)
        return None if epoch is None else int(epoch)

    def _source_state(self) -> Any:
        """Return a copy of the source's own state, or None if it keeps none."""
        if not hasattr(self.source, "state_dict"):
            return None
        return deepcopy(self.source.state_dict())

    def _load_source(self, state: Any) -> None:
        """Load the source's own state."""
        self.source.load_state_dict(state)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next packs depend on: plain values, with the documents held.

        It is about as large as the documents in the buffer, so save it at checkpoints rather than
        at every step (`StatefulDataLoader(..., snapshot_every_n_steps=...)`).
        """
        if self._loaded is not None:
            return self._loaded
        held = [encode_document(document) for document in self._held.values()]
        return {
            "version": _STATE_VERSION,
            "settings": self._settings(),
            "epoch": self._epoch(),
            "source": self._source_state(),
            "read": self._read,
            "pieces": self._pieces,
            "packer": self._packer.state_dict(),
            "held": list(self._held),
            "documents": held,
            "last": None if self._last is None else [list(pack) for pack in self._last],
            "counts": self.cutter.counts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next iteration, where the stream that gave `state` stood.

        The source is to be the one that was packed, at its beginning: a
        `datasets.IterableDataset` goes on from its own state, which loses what its own shuffle
        buffer held; any other iterable is read again up to that place.

        Args:
            state: What `state_dict` returned.

        Raises:
            PlanningError: If the state is of a stream with other settings.
        """
        own = {"version": _STATE_VERSION, "settings": self._settings()}
        other = {name: state.get(name) for name in own}
        if own != other:
            raise PlanningError(
                f"The state is of a stream with {other} and this one has {own}; its packs would "
                "not be the same. Accepted: the settings of the state. Build the stream with them."
            )
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._loaded = state

    def _restore(self, state: dict[str, Any]) -> None:
        """Take over what the stream that gave `state` held."""
        if state["epoch"] != self._epoch():
            raise PlanningError(
                f"The state was saved in epoch {state['epoch']} and the source is in epoch "
                f"{self._epoch()}, so it would begin again and repeat documents. Accepted: the "
                f"epoch of the state. Write stream.set_epoch({state['epoch']})."
            )
        self._start()
        self._packer.load_state_dict(state["packer"])
        documents = (decode_document(document) for document in state["documents"])
        self._held.update(zip(state["held"], documents, strict=True))
        self._last = None if state["last"] is None else deque(list(p) for p in state["last"])
        self._read, self._pieces = state["read"], state["pieces"]
        self.cutter.restore(state["counts"])

    def _settings(self) -> dict[str, Any]:
        """Return what decides the packs besides the documents."""
        return {"buffer": self.buffer, **self.cutter.settings()}
