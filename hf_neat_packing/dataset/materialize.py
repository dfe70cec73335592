"""Write packs as real nested Arrow columns: gathered batch by batch, laid out by offsets alone."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hf_neat_packing._compat import data_fingerprint
from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.dataset.arrow import nest, spans
from hf_neat_packing.dataset.document_table import DocumentTable
from hf_neat_packing.planning import PackingPlan

if TYPE_CHECKING:
    import datasets

# Of a batch that is written: the work for each does not count, and it is still in the cache.
_TOKENS_WRITTEN = 2**18
# Of a batch that is kept: memory for large arrays is paged in much quicker.
_TOKENS_KEPT = 2**22


class PackedView(Protocol):
    """Name what is read of a `PackedDataset`, so that it can use this module."""

    plan: PackingPlan
    documents: DocumentTable

    def __len__(self) -> int: ...

    @property
    def rules(self) -> dict[str, ColumnRule]:
        """The rule of each column."""

    @property
    def dataset(self) -> "datasets.Dataset":
        """The documents."""

    @property
    def features(self) -> "datasets.Features":
        """The features of the packs."""


def nested_features(
    features: "datasets.Features", rules: Mapping[str, ColumnRule]
) -> "datasets.Features":
    """Return the features of a packed set: one list level above those of the documents.

    Args:
        features: Features of the documents.
        rules: The rule of each column to be packed; `ignore` leaves it out.
    """
    from datasets import Features

    nested: dict[str, Any] = {}
    for name, rule in rules.items():
        feature = features[name]
        if rule.kind == "token":
            # A piece may be shorter than its document, so a fixed length does not survive.
            nested[name] = [[feature[0] if isinstance(feature, list) else feature.feature]]
        elif rule.kind != "ignore":
            nested[name] = [feature]
    return Features(nested)


def materialize(
    view: PackedView, *, num_proc: int | None = None, keep_in_memory: bool | None = None
) -> "datasets.Dataset":
    """Write the packs of a view as a `datasets.Dataset`, in memory or in a cache file.

    Args:
        view: The view.
        num_proc: Threads that gather documents.
        keep_in_memory: Whether the packs are in memory; None: if the view's data set is.

    Returns:
        A data set with one row per pack and nested columns. Out of memory it is a memory-mapped
        file, named by a fingerprint of data and plan and used again if it is there: beside the
        view's data set, or in a temporary folder of the process if that is in memory.
    """
    import datasets

    source = view.dataset
    fingerprint = _fingerprint(view)
    info = datasets.DatasetInfo(
        description=source.info.description,
        citation=source.info.citation,
        homepage=source.info.homepage,
        license=source.info.license,
        features=view.features,
    )
    keywords = {"info": info, "split": source.split, "fingerprint": fingerprint}
    schema = view.features.arrow_schema
    if keep_in_memory is None:
        keep_in_memory = not source.cache_files
    if keep_in_memory:
        # Text and pictures of so many documents may be more than one array can hold.
        small = any(view.rules[name].kind != "token" for name in schema.names)
        batches = _batches(view, schema, num_proc, _TOKENS_WRITTEN if small else _TOKENS_KEPT)
        table = pa.Table.from_batches(batches, schema=schema)
        return datasets.Dataset(datasets.table.InMemoryTable(table), **keywords)
    path = _folder(source) / f"packed-{fingerprint}.arrow"
    if not (path.exists() and datasets.is_caching_enabled()):
        with (
            _replacing(path) as unfinished,
            pa.OSFile(str(unfinished), "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
        ):
            for batch in _batches(view, schema, num_proc, _TOKENS_WRITTEN):
                writer.write_batch(batch)
    return datasets.Dataset(datasets.table.MemoryMappedTable.from_file(str(path)), **keywords)


def write_parquet(view: PackedView, path: Path, *, num_proc: int | None = None) -> None:
    """Write the packs of a view as one parquet file, a batch at a time.

    Args:
        view: The view.
        path: The file; it appears only when it is complete.
        num_proc: Threads that gather documents.
    """
    schema = view.features.arrow_schema
    with _replacing(path) as unfinished, pq.ParquetWriter(unfinished, schema) as writer:
        for batch in _batches(view, schema, num_proc, _TOKENS_WRITTEN):
            writer.write_batch(batch)


def _folder(source: "datasets.Dataset") -> Path:
    """Return where files made from a data set are kept, as `datasets` itself keeps them."""
    from datasets.fingerprint import get_temporary_cache_files_directory

    if source.cache_files:
        return Path(source.cache_files[0]["filename"]).parent
    return Path(get_temporary_cache_files_directory())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a name to write under, and move the file to its own name only if all went well."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _batches(
    view: PackedView, schema: pa.Schema, num_proc: int | None, tokens_per_batch: int
) -> Iterator[pa.RecordBatch]:
    """Gather all packs in order, a bounded number of batches ahead, behind a progress bar."""
    from datasets.utils import tqdm

    offsets = view.plan.offsets
    tokens = np.concatenate(([0], np.cumsum(view.plan.lengths, dtype=np.int64)))[offsets]
    threads = max(1, num_proc or 1)
    parts = spans(tokens, tokens_per_batch)
    with tqdm(total=len(view), unit=" packs", desc="Packing") as bar:
        if threads == 1:
            for first, last in parts:
                yield _batch(view, schema, first, last)
                bar.update(last - first)
            return
        with ThreadPoolExecutor(threads) as pool:
            waiting: deque[Future[pa.RecordBatch]] = deque()
            for first, last in parts:
                waiting.append(pool.submit(_batch, view, schema, first, last))
                if len(waiting) > threads:
                    yield _finish(waiting.popleft(), bar)
            while waiting:
                yield _finish(waiting.popleft(), bar)


def _finish(future: "Future[pa.RecordBatch]", bar: Any) -> pa.RecordBatch:
    """Wait for a batch and show it on the bar."""
    batch = future.result()
    bar.update(batch.num_rows)
    return batch


def _batch(view: PackedView, schema: pa.Schema, first: int, last: int) -> pa.RecordBatch:
    """Gather the packs `first` to `last` into one record batch of nested columns."""
    plan = view.plan
    outer: NDArray[np.int64] = plan.offsets[first : last + 1] - plan.offsets[first]
    span = slice(int(plan.offsets[first]), int(plan.offsets[last]))
    documents, lengths = plan.indices[span], plan.lengths[span]
    starts = None if plan.starts is None else plan.starts[span]
    inner = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    columns = []
    for field in schema:
        name = field.name
        if view.rules[name].kind == "token":
            flat = view.documents.read_tokens(name, documents, starts, lengths)
            columns.append(nest(flat, inner, outer))
        else:
            values = view.documents.read_stored(name, documents)
            offsets = pa.array(outer.astype(np.int32))
            columns.append(pa.ListArray.from_arrays(offsets, values))
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def _fingerprint(view: PackedView) -> str:
    """Hash what decides the packs: the data set, the plan and the rules."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(data_fingerprint(view.dataset).encode())
    digest.update(repr(sorted(view.rules.items(), key=lambda item: item[0])).encode())
    for part in (view.plan.indices, view.plan.offsets, view.plan.lengths, view.plan.starts):
        digest.update(b"|" if part is None else np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
