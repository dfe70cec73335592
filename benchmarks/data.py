"""Time data sets of packs against TRL's, in one process on the same documents.

Run from the repository root: `python benchmarks/data.py [--documents 100000] [--max-length 4096]`.
Every figure is a median of repeated runs on this machine, printed with the ratio to TRL's. Times
are CPU seconds of the process, so that other work on the machine disturbs them little. Peak memory
is resident memory, pages of mapped files included, of a child process that has packed a small set
before. Tokens of both are checked to be the same.
"""

import argparse
import ctypes
import gc
import multiprocessing
import pickle
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import trl

from hf_neat_packing import RankBalancedPackSampler, pack_dataset, pack_stream
from hf_neat_packing.planning import imbalance, lower_bound

# Lognormal lengths (median, sigma) that chat and instruction data have.
KINDS = {"chat": (350, 1.0), "instructions": (100, 0.6)}


def make_lengths(kind: str, count: int, max_length: int) -> np.ndarray:
    """Draw document lengths, int64 `[count]`, in tokens."""
    median, sigma = KINDS[kind]
    draw = np.random.default_rng(0).lognormal(np.log(median), sigma, count)
    return np.clip(draw.astype(np.int64), 8, max_length)


def make_dataset(lengths: np.ndarray) -> datasets.Dataset:
    """Build a data set of random int32 tokens with labels, in memory."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 32_000, offsets[-1], dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    return datasets.Dataset(pa.table({"input_ids": column, "labels": column}))


def median_ms(work: Callable[[], Any], repeats: int) -> float:
    """Return the median time of `work`, in milliseconds; what it returns is gone before the next."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        result = work()
        times.append(time.process_time() - start)
        remove_files(result)
        del result
    return 1000 * statistics.median(times)


def remove_files(result: Any) -> None:
    """Delete the cache file of a data set that was made for a measurement."""
    for file in getattr(result, "cache_files", []):
        Path(file["filename"]).unlink(missing_ok=True)


def peak_mb(work: Callable[[datasets.Dataset], Any], data: datasets.Dataset) -> float:
    """Return how far `work` on `data` raises the peak resident memory of a child process, in MB."""
    small = make_dataset(make_lengths("chat", 100, 64))

    def child(pipe: Any) -> None:
        remove_files(work(small))  # what code and libraries need is there after this
        pa.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)  # free memory of the parent must not serve this work
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
        before = resident_peak()
        result = work(data)
        pipe.send(resident_peak() - before)
        remove_files(result)

    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(send,))
    process.start()
    send.close()
    peak = receive.recv()
    process.join()
    return max(0.0, peak)


def resident_peak() -> float:
    """Return the peak resident memory of this process since it was last reset, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_packs(packed: Any, count: int) -> Callable[[], None]:
    """Return work that reads `count` packs, spread over the set."""
    chosen = np.linspace(0, len(packed) - 1, count).astype(int).tolist()

    def work() -> None:
        for pack in chosen:
            packed[pack]

    return work


def checksum(packs: Any) -> int:
    """Sum all tokens of the packs, nested or flat."""
    column = packs.data.table.column("input_ids").combine_chunks()
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    return int(column.to_numpy().sum(dtype=np.int64))


def show(name: str, ours: float, theirs: float, unit: str, note: str = "") -> None:
    """Print one row of the table."""
    ratio = f"{theirs / ours:9.1f}" if ours else f"{'-':>9}"
    print(f"  {name:44} {ours:12,.1f} {theirs:12,.1f} {ratio}  {unit:6} {note}", flush=True)


def compare(kind: str, arguments: argparse.Namespace) -> None:
    """Print the comparison for one kind of documents."""
    limit, repeats = arguments.max_length, arguments.repeats
    lengths = make_lengths(kind, arguments.documents, limit)
    memory = make_dataset(lengths)
    print(
        f"\n{kind}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens, "
        f"max_length {limit:,}, at least {lower_bound(lengths, limit):,} packs"
    )
    print(f"  {'':44} {'ours':>12} {'TRL':>12} {'TRL/ours':>9}")
    with tempfile.TemporaryDirectory() as folder:
        memory.save_to_disk(folder)
        for place, data in (("memory", memory), ("disk", datasets.load_from_disk(folder))):
            compare_place(place, data, limit, repeats)
    compare_streams(lengths, limit, repeats)
    compare_stored_streams(memory, limit, repeats)
    compare_balance(memory, limit)


def compare_place(place: str, data: datasets.Dataset, limit: int, repeats: int) -> None:
    """Compare for documents in memory or on disk."""

    def pack_theirs(documents: datasets.Dataset) -> Any:
        return trl.pack_dataset(documents, limit, map_kwargs={"load_from_cache_file": False})

    def pack_ours(documents: datasets.Dataset, strategy: Any = "best_fit") -> Any:
        return pack_dataset(documents, max_length=limit, strategy=strategy)

    works: dict[str, Callable[[datasets.Dataset], Any]] = {
        "plan and view, best_fit": pack_ours,
        "plan and view, bfd": lambda documents: pack_ours(documents, "bfd"),
        "materialized into a file": lambda d: pack_ours(d).materialize(keep_in_memory=False),
        "materialized into memory": lambda d: pack_ours(d).materialize(keep_in_memory=True),
    }
    view, theirs = pack_ours(data), pack_theirs(data)
    assert checksum(view.materialize()) == checksum(theirs) == checksum(data)
    # In turns: the machine may be half as fast a minute later. A view is quick, and timed three times.
    calls = [(pack_theirs, 1)] + [
        (work, 3 if "view" in name else 1) for name, work in works.items()
    ]
    rounds = [
        [median_ms(lambda work=work: work(data), times) for work, times in calls]
        for _ in range(repeats)
    ]
    their_ms, *our_ms = map(statistics.median, zip(*rounds, strict=True))
    their_mb = peak_mb(pack_theirs, data)
    for (name, work), milliseconds in zip(works.items(), our_ms, strict=True):
        note = f"{len(work(data)):,} packs against {len(theirs):,}" if "view" in name else ""
        show(f"{place}: {name}", milliseconds, their_ms, "ms", note)
        show(f"{place}: peak memory of that", peak_mb(work, data), their_mb, "MB")
    count = min(2000, len(view))
    ours = 1000 * median_ms(read_packs(view, count), repeats) / count
    for form in (None, "numpy"):
        read = read_packs(theirs.with_format(form), min(2000, len(theirs)))
        their_us = 1000 * median_ms(read, repeats) / min(2000, len(theirs))
        show(f"{place}: reading a pack (TRL: {form or 'lists'})", ours, their_us, "us")
    kilobytes = len(pickle.dumps(view)) / 1000
    show(f"{place}: pickle", kilobytes, len(pickle.dumps(theirs)) / 1000, "kB")
    remove_files(theirs)


def compare_streams(lengths: np.ndarray, limit: int, repeats: int) -> None:
    """Time streams of documents that are there already; TRL packs no streams of its own."""
    ids = np.zeros(limit, dtype=np.int32)
    as_list = ids.tolist()
    forms = {
        "arrays": [{"input_ids": ids[:n], "labels": ids[:n]} for n in lengths.tolist()],
        "lists": [{"input_ids": (part := as_list[:n]), "labels": part} for n in lengths.tolist()],
    }
    bound = lower_bound(lengths, limit)
    for form, documents in forms.items():
        for buffer in (1000, 4096):

            def work(documents: Any = documents, buffer: int = buffer) -> int:
                return sum(1 for _ in pack_stream(documents, max_length=limit, buffer=buffer))

            rate = len(lengths) / median_ms(work, repeats) / 1000
            print(
                f"  stream of {form}, buffer {buffer:5,}: {rate:.2f} M documents/s, "
                f"{100 * (work() / bound - 1):.3f} % above the bound",
                flush=True,
            )


def compare_stored_streams(data: datasets.Dataset, limit: int, repeats: int) -> None:
    """Time packing a stored stream against only reading its rows, as `datasets` gives them."""
    with tempfile.TemporaryDirectory() as folder:
        data.save_to_disk(folder)
        stream = datasets.load_from_disk(folder).to_iterable_dataset(num_shards=4)

        def work(buffer: int) -> int:
            packs = pack_stream(stream, max_length=limit, buffer=buffer, by_tables=True)
            return sum(1 for _ in packs)

        few = min(20_000, len(data))
        by_row = few / median_ms(lambda: sum(1 for _ in stream.take(few)), 1) / 1000
        for buffer in (1000, 4096):
            rate = len(data) / median_ms(lambda buffer=buffer: work(buffer), repeats) / 1000
            print(
                f"  stored stream, buffer {buffer:5,}: {rate:.2f} M documents/s; its rows alone, unpacked: "
                f"{by_row:.3f} M documents/s",
                flush=True,
            )


def compare_balance(data: datasets.Dataset, limit: int) -> None:
    """Measure the time lost to the slowest of 8 ranks, in the cost model of `pack_costs`."""
    view = pack_dataset(data, max_length=limit)
    samplers = [
        RankBalancedPackSampler(view, num_ranks=8, rank=r, batches_per_update=8, drop_last=True)
        for r in range(8)
    ]
    dealt = np.array([[pack for batch in s for pack in batch] for s in samplers]).T.ravel()
    costs = samplers[0].costs
    random = np.random.default_rng(0).permutation(len(view))
    lost, before = imbalance(costs[dealt], 8), imbalance(costs[random], 8)
    print(
        f"  time lost to the slowest of 8 ranks: {100 * lost:.2f} % balanced, "
        f"{100 * before:.2f} % in random order ({lost / before:.2f} of it)"
    )


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    datasets.disable_caching()
    pa.set_cpu_count(1)
    print(
        f"Python {sys.version.split()[0]}, numpy {np.__version__}, pyarrow {pa.__version__}, "
        f"datasets {datasets.__version__}, trl {trl.__version__}"
    )
    for kind in arguments.kinds:
        compare(kind, arguments)


if __name__ == "__main__":
    main()
