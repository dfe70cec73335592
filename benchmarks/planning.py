"""Planners compared on the same lengths in one process: time, packs, composition, memory.

    python benchmarks/planning.py                      # 100,000 documents, 4,096 tokens a pack
    python benchmarks/planning.py --n 1e4,1e5,1e6 --max-length 2048,4096,8192,32768
    python benchmarks/planning.py --planner mypackage.packing:pack

Times are CPU seconds of the process, so that other work on the machine disturbs them little.
Every planner is also checked: each document once, no pack above capacity. TRL, where installed, is
what the ratios refer to; only its plan is on the clock, without the gathering of tokens after it.

A planner given by --planner is called as `function(lengths, max_length)` with an int64 array, and
returns packs of document indices: `(indices, offsets)`, or one sequence of indices for each pack.
"""

import argparse
import gc
import importlib
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_neat_packing.planning import PackingPlan, lower_bound, plan_packing

Int64Array = npt.NDArray[np.int64]


class Packs(NamedTuple):
    """Document indices pack after pack, and where each pack begins."""

    indices: Int64Array
    offsets: Int64Array


class Result(NamedTuple):
    """What one planner did on one input."""

    seconds: float
    packs: Packs


Planner = Callable[[Int64Array, int], Result]


# ------------------------------------------------------------------------------------ inputs
def chat(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Lognormal, median 350: turns of a conversation."""
    return np.clip(np.exp(np.log(350) + rng.standard_normal(n)), 8, capacity)


def instructions(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Lognormal, median 100, narrower: one question, one answer."""
    return np.clip(np.exp(np.log(100) + 0.6 * rng.standard_normal(n)), 8, capacity)


def long_documents(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Short pages and long reports, the longest cut to a full pack."""
    short = np.exp(np.log(600) + 0.8 * rng.standard_normal(n))
    long = np.exp(np.log(12_000) + 0.7 * rng.standard_normal(n))
    return np.clip(np.where(rng.random(n) < 0.7, short, long), 16, capacity)


def uniform(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Every length alike."""
    return rng.integers(1, capacity + 1, n)


def thirds(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Just above a third and just above a quarter of a pack."""
    width = capacity // 24
    third, quarter = capacity // 3 + 1, capacity // 4 + 1
    return np.where(rng.random(n) < 0.5, third, quarter) + rng.integers(0, width, n)


def triplets(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Threes that fill a pack exactly (Falkenauer): the best plan has n / 3 packs."""
    first = rng.integers(capacity * 38 // 100, capacity * 49 // 100 + 1, n // 3)
    rest = capacity - first
    low = np.maximum(capacity // 4, rest - capacity // 2 + 1)
    second = low + (rng.random(n // 3) * (rest // 2 - low + 1)).astype(np.int64)
    return rng.permutation(np.concatenate([first, second, rest - second]))


def middle(rng: np.random.Generator, n: int, capacity: int) -> Any:
    """Uniform between a tenth and a half of a pack."""
    return rng.integers(capacity // 10, capacity // 2, n)


INPUTS = {
    "chat": chat,
    "instructions": instructions,
    "long": long_documents,
    "uniform": uniform,
    "thirds": thirds,
    "triplets": triplets,
    "middle": middle,
}


def make_lengths(name: str, n: int, capacity: int) -> Int64Array:
    """Draw `n` document lengths of a kind, the same for the same arguments."""
    rng = np.random.default_rng([sum(map(ord, name)), n, capacity])
    return np.ascontiguousarray(INPUTS[name](rng, n, capacity), dtype=np.int64)


# ---------------------------------------------------------------------------------- planners
def ours(strategy: Any) -> Planner:
    """Wrap `plan_packing` with one of its strategies."""

    def run(lengths: Int64Array, capacity: int) -> Result:
        start = time.process_time()
        plan = plan_packing(lengths, capacity, strategy=strategy)
        return Result(time.process_time() - start, as_packs(plan))

    return run


def other(path: str) -> Planner:
    """Wrap a planner given as `module:function`."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)

    def run(lengths: Int64Array, capacity: int) -> Result:
        start = time.process_time()
        result = function(lengths, capacity)
        return Result(time.process_time() - start, as_packs(result))

    return run


class _Planned(Exception):
    """Raised where TRL's plan is complete, to leave before it gathers tokens."""


class _Clock:
    """Stand in for `pyarrow.compute` inside TRL and note when its plan begins and ends."""

    def __init__(self, compute: Any):
        self.compute = compute
        self.begin = self.end = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute, name)

    def filter(self, lists: Any, _: Any) -> Any:
        # No list here is empty, and to find that out costs eight bytes a token.
        return lists

    def list_slice(self, lists: Any, *_: Any) -> Any:
        # Nor is one too long.
        return lists

    def make_struct(self, *args: Any, **kwargs: Any) -> Any:
        self.begin = time.process_time()
        return self.compute.make_struct(*args, **kwargs)

    def take(self, *_: Any, **__: Any) -> Any:
        self.end = time.process_time()
        raise _Planned


def trl(lengths: Int64Array, capacity: int) -> Result:
    """Run TRL's best-fit decreasing over the whole set, on lists that hold no tokens."""
    import pyarrow as pa
    from trl import data_utils

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    clock = _Clock(data_utils.pc)
    data_utils.pc = clock
    try:
        # pack_dataset reaches it only through datasets.map, which costs more than the plan.
        data_utils._pack_bfd(pa.table({"input_ids": tokens}), capacity)  # noqa: SLF001
    except _Planned as planned:
        frame = planned.__traceback__
        while frame is not None and "bins" not in frame.tb_frame.f_locals:
            frame = frame.tb_next
        bins = frame.tb_frame.f_locals["bins"] if frame else []
        packs = as_packs([pack["ids"] for pack in bins])
    finally:
        data_utils.pc = clock.compute
    return Result(clock.end - clock.begin, packs)


def as_packs(result: Any) -> Packs:
    """Bring a plan into indices and offsets."""
    if isinstance(result, PackingPlan):
        return Packs(result.indices.astype(np.int64), result.offsets)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], np.ndarray):
        return Packs(np.asarray(result[0], np.int64), np.asarray(result[1], np.int64))
    counts = np.fromiter(map(len, result), np.int64, len(result))
    flat = (int(document) for pack in result for document in pack)
    indices = np.fromiter(flat, np.int64, int(counts.sum()))
    return Packs(indices, np.concatenate([[0], np.cumsum(counts)]))


# ----------------------------------------------------------------------------------- figures
def check(packs: Packs, lengths: Int64Array, capacity: int) -> None:
    """Raise unless every document is in one pack and no pack is above capacity."""
    seen = np.bincount(packs.indices, minlength=len(lengths))
    if len(seen) != len(lengths) or (seen != 1).any():
        raise SystemExit("a document is missing or doubled")
    if np.add.reduceat(lengths[packs.indices], packs.offsets[:-1]).max() > capacity:
        raise SystemExit("a pack is above capacity")


def between_share(packs: Packs, lengths: Int64Array) -> float:
    """Compute the share of the variance of log length that lies between packs (eta squared)."""
    logs = np.log(lengths[packs.indices])
    counts = np.diff(packs.offsets)
    means = np.add.reduceat(logs, packs.offsets[:-1]) / counts
    total = float(((logs - logs.mean()) ** 2).sum())
    return float((counts * (means - logs.mean()) ** 2).sum()) / total if total else 0.0


def random_share(packs: Packs) -> float:
    """Compute the share expected when documents are dealt to these packs at random."""
    return (len(packs.offsets) - 2) / max(1, len(packs.indices) - 1)


def bytes_per_document(planner: Planner, lengths: Int64Array, capacity: int) -> float:
    """Measure the highest memory of a plan beyond the lengths it was given."""
    tracemalloc.start()
    try:
        planner(lengths, capacity)
        return tracemalloc.get_traced_memory()[1] / len(lengths)
    finally:
        tracemalloc.stop()


def measure(planner: Planner, lengths: Int64Array, capacity: int, repeats: int) -> Result:
    """Run a planner until it has run `repeats` times or for two seconds; the median time."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < 2:
        gc.collect()
        result = planner(lengths, capacity)
        seconds.append(result.seconds)
    return Result(statistics.median(seconds), result.packs)


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """List the inputs, capacities and sizes asked for."""
    for n in args.n:
        for capacity in args.max_length:
            for name in args.inputs:
                yield name, capacity, n


def run(args: argparse.Namespace) -> None:
    """Measure every planner on every input and print the table."""
    planners: dict[str, Planner] = {} if args.without_trl else {"trl": trl}
    planners |= {name: ours(name) for name in args.strategies}
    planners |= {path: other(path) for path in args.planner}
    ratios: dict[str, list[float]] = {name: [] for name in planners}
    print(
        f"{'input':<13}{'capacity':>9}{'n':>12}  {'planner':<12}{'ms':>10}{'x TRL':>8}{'packs':>9}"
        f"{'above':>9}{'between':>9}{'chance':>8}{'B/doc':>8}"
    )
    for name, capacity, n in cells(args):
        lengths = make_lengths(name, n, capacity)
        bound = lower_bound(lengths, capacity)
        reference = 0.0
        for label, planner in planners.items():
            seconds, packs = measure(planner, lengths, capacity, args.repeats)
            check(packs, lengths, capacity)
            reference = seconds if label == "trl" else reference
            ratio = reference / seconds
            ratios[label].append(ratio)
            memory = bytes_per_document(planner, lengths, capacity) if args.memory else np.nan
            count = len(packs.offsets) - 1
            print(
                f"{name:<13}{capacity:>9,}{n:>12,}  {label:<12}{seconds * 1e3:>10.2f}{ratio:>8.1f}"
                f"{count:>9,}{(count - bound) / bound:>9.3%}{between_share(packs, lengths):>9.3f}"
                f"{random_share(packs):>8.3f}{memory:>8.0f}",
                flush=True,
            )
    if not args.without_trl:
        for label, values in ratios.items():
            print(
                f"{label}: {min(values):.1f} to {max(values):.1f} times TRL's speed, "
                f"median {statistics.median(values):.1f}"
            )


def main() -> None:
    """Read the command line."""

    def integers(text: str) -> list[int]:
        return [int(float(part)) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=integers, default=[100_000], help="numbers of documents")
    parser.add_argument("--max-length", type=integers, default=[4096], help="tokens of a pack")
    parser.add_argument("--inputs", type=names, default=list(INPUTS), help=", ".join(INPUTS))
    parser.add_argument("--strategies", type=names, default=["bfd", "best_fit"])
    parser.add_argument("--planner", action="append", default=[], help="module:function")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure memory too (runs longer)")
    parser.add_argument("--repeats", type=int, default=5)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
