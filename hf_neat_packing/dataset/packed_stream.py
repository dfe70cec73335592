"""The packed stream: a bounded buffer, and a state to resume from exactly where a run stopped.

Documents go into packs in the order of arrival, and the end of each pack is chosen from the
documents held: some packs at a time, and the oldest document is in one of them. What is held
travels in `state_dict()`, so a run that was killed continues with the very packs that it would have
made.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from hf_neat_packing._compat import streams_tables
from hf_neat_packing.dataset.stream_documents import DocumentCutter
from hf_neat_packing.dataset.stream_rows import Row, decode_row, encode_row, own
from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import Accounting
from hf_neat_packing.planning.best_fit import last_packs, packs_of_window

if TYPE_CHECKING:
    from hf_neat_packing.dataset.stream_tables import StreamTables

_STATE_VERSION = 3
# Choices of packs after which the documents that still wait are copied out of their tables.
_CHOICES_BEFORE_COPY = 8

# Reads about as many documents as are asked for; none at the end of the source.
_Read = Callable[[int], Sequence[Mapping[str, Any]]]


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
        by_tables: As for `pack_stream`.
    """

    def __init__(
        self,
        source: Iterable[Mapping[str, Any]],
        cutter: DocumentCutter,
        *,
        buffer: int,
        by_tables: bool = False,
    ) -> None:
        if buffer < 1:
            raise PlanningError(
                f"buffer={buffer}: a stream holds at least one document. Write buffer=4096 for packs "
                "that are full."
            )
        self.source = source
        self.cutter = cutter
        self.buffer = buffer
        if by_tables:
            _require_tables(source)
        self._by_tables = by_tables
        self._source_at: Any = None  # of a loaded state, until the source is read on
        self._tables: StreamTables | None = None
        self._initial = self._source_state()
        self._source_moved = False
        self._loaded: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        """Hold nothing, having read nothing."""
        self._columns: tuple[str, ...] = ()
        self._waiting: list[Row] = []
        self._lengths = np.zeros(0, dtype=np.int64)
        self._packs: deque[list[Row]] = deque()  # chosen, and not given yet
        self._read = self._choices = 0
        self._source_at = None
        self.cutter.reset()

    @property
    def accounting(self) -> Accounting:
        """What became of every document and token that this iteration has read."""
        return self.cutter.accounting()

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        read = self._open_source()
        while self._packs or self._choose(read):
            pack = self._packs.popleft()
            columns = zip(*pack, strict=False)  # rows are of one length by construction
            yield dict(zip(self._columns, map(list, columns), strict=False))

    def _choose(self, read: _Read) -> bool:
        """Read documents until packs can be chosen well, and choose some; say whether there are any."""
        while missing := self._missing():
            block = read(missing)
            self._source_at = None
            if not block:
                self._take_out(last_packs(self._lengths, self.cutter.max_length))
                return bool(self._packs)
            rows, lengths = self.cutter.take(block, self._read)
            self._columns = self.cutter.columns
            self._read += len(block)
            self._waiting += rows
            self._lengths = np.concatenate((self._lengths, np.array(lengths, dtype=np.int64)))
        self._take_out(packs_of_window(self._lengths, self.cutter.max_length))
        return True

    def _missing(self) -> int:
        """Say how many documents to read before packs can be chosen well."""
        held, tokens = len(self._waiting), int(self._lengths.sum())
        if held < self.buffer:
            return self.buffer - held
        # One pack's worth is the floor: fewer documents than fill a pack would leave it half empty.
        short = self.cutter.max_length - tokens
        return max(1, short * held // (2 * tokens)) if short > 0 else 0

    def _take_out(self, packs: list[list[int]]) -> None:
        """Move documents from those that wait into packs."""
        self._packs.extend([self._waiting[place] for place in pack] for pack in packs)
        stays = np.ones(len(self._waiting), dtype=np.bool_)
        stays[[place for pack in packs for place in pack]] = False
        self._waiting = list(compress(self._waiting, stays.tolist()))
        self._lengths = self._lengths[stays]
        self._choices += 1
        if self._by_tables and self._choices % _CHOICES_BEFORE_COPY == 0:
            # A document that waits long would keep all those of its table in memory.
            self._waiting = list(map(own, self._waiting))

    def _open_source(self) -> _Read:
        """Open the source at its beginning, or where the loaded state stood."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self._start()
        else:
            self._restore(loaded)
        if not self._by_tables:
            documents = self._open_rows()
            return lambda count: list(islice(documents, count))
        from hf_neat_packing.dataset.stream_tables import StreamTables

        _require_tables(self.source)
        tokens = self.cutter.token_columns(self.source.features)  # type: ignore[attr-defined]
        self._tables = StreamTables(self.source, self.buffer, tokens, self._source_at)
        return self._tables.read

    def _open_rows(self) -> Iterator[Mapping[str, Any]]:
        """Open a source that is read row by row."""
        if self._source_at is not None:
            self._load_source(self._source_at)
            self._source_moved = True
            return self._iterate()
        if self._source_moved:
            # A datasets.IterableDataset would otherwise begin at the loaded place again.
            self._load_source(self._initial)
            self._source_moved = False
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
        if self._source_at is not None:
            return self._source_at
        if self._by_tables:
            return None if self._tables is None else self._tables.state_dict()
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
        return {
            "version": _STATE_VERSION,
            "settings": self._settings(),
            "epoch": self._epoch(),
            "source": self._source_state(),
            "read": self._read,
            "columns": list(self._columns),
            "waiting": list(map(encode_row, self._waiting)),
            "lengths": self._lengths.tolist(),
            "packs": [list(map(encode_row, pack)) for pack in self._packs],
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
        self._columns = tuple(state["columns"])
        self._waiting = list(map(decode_row, state["waiting"]))
        self._lengths = np.array(state["lengths"], dtype=np.int64)
        self._packs.extend(list(map(decode_row, pack)) for pack in state["packs"])
        self._read = state["read"]
        self._source_at = state["source"]
        self.cutter.restore(state["counts"])

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the reader of tables, which is opened anew."""
        if not self._by_tables:
            return self.__dict__
        return {**self.__dict__, "_tables": None, "_source_at": self._source_state()}

    def _settings(self) -> dict[str, Any]:
        """Return what decides the packs besides the documents."""
        return {"buffer": self.buffer, "tables": self._by_tables, **self.cutter.settings()}


def _require_tables(source: Any) -> None:
    """Raise for a source that cannot be read by tables."""
    if not _has_tables(source):
        raise PlanningError(
            f"by_tables=True, and this {type(source).__name__} does not hand on Arrow tables of "
            "numbers and text as they are stored, or it was given a state of its own, which counts "
            "rows. Accepted: a stored datasets.IterableDataset, shuffled, sharded or neither, before "
            "any map, filter or format, which goes on by load_state_dict of the stream. Leave "
            "by_tables out."
        )


def _has_tables(source: Any) -> bool:
    """Whether a source can be read by tables; nothing else needs pyarrow."""
    if not streams_tables(source):
        return False
    from hf_neat_packing.dataset.stream_tables import are_plain

    return are_plain(source.features.arrow_schema)
