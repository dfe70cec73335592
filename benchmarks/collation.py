"""Time collation and 4-D masks against transformers and TRL, in one process on the same documents.

Run from the repository root: `python benchmarks/collation.py [--documents 64] [--tokens 8192]`.
Medians of alternating rounds on one thread. Outputs are checked to be the same before anything is
timed; peak memory is that of a child process, beyond what it had after a small row.
"""

import argparse
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from transformers import DataCollatorWithFlattening, LlamaConfig
from transformers.masking_utils import create_causal_mask
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.masks import block_mask

BATCH_ROUNDS = 31
MASK_ROUNDS = 9
COMPARED = ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q")


def make_lengths(count: int, tokens: int) -> np.ndarray:
    """Draw document lengths that sum to `tokens`, int64 `[count]`."""
    weights = np.random.default_rng(0).lognormal(0, 0.6, count)
    lengths = np.maximum(8, (weights / weights.sum() * tokens).astype(np.int64))
    lengths[int(lengths.argmax())] += tokens - int(lengths.sum())
    return lengths


def make_features(lengths: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Make the documents in every form that data sets give."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 32_000, length) for length in lengths.tolist()]
    labels = [np.where(np.arange(len(d)) < len(d) // 3, -100, d) for d in ids]
    forms: dict[str, Callable[[np.ndarray], Any]] = {
        "lists": np.ndarray.tolist,
        "arrays, int64": lambda tokens: tokens,
        "arrays, int32": lambda tokens: tokens.astype(np.int32),
        "tensors": torch.from_numpy,
    }
    pairs = list(zip(ids, labels, strict=True))
    return {
        name: [{"input_ids": form(a), "labels": form(b)} for a, b in pairs]
        for name, form in forms.items()
    }


def medians(works: list[Callable[[], Any]], *, rounds: int, calls: int) -> list[float]:
    """Return the median time of one call of each, in milliseconds, from alternating rounds."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, found in zip(works, times, strict=True):
            for _ in range(calls):
                start = time.perf_counter()
                result = work()
                found.append(time.perf_counter() - start)
                del result
    return [1000 * statistics.median(found) for found in times]


def compare_collators(lengths: np.ndarray) -> None:
    """Print the time of one batch."""
    ours = DataCollatorForNeatPacking(return_seq_idx=True)
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    padding_free = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    print(f"\n{len(lengths)} documents, {int(lengths.sum()):,} tokens: one batch, all outputs, ms")
    print(f"  {'documents are':16}{'ours':>9}{'flattening':>12}{'ratio':>8}{'TRL':>9}{'ratio':>8}")
    for form, features in make_features(lengths).items():
        got, expected = ours(features), flattening(features)
        for name in COMPARED:
            assert torch.equal(got[name], expected[name]), (form, name)
        works = [lambda f=features, c=c: c(f) for c in (ours, flattening, padding_free)]
        mine, theirs, trls = medians(works, rounds=BATCH_ROUNDS, calls=10)
        print(
            f"  {form:16}{mine:9.3f}{theirs:12.3f}{theirs / mine:8.1f}{trls:9.3f}{trls / mine:8.1f}",
            flush=True,
        )


def mask_builders(tokens: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return functions that build the boolean mask of one row: ours, and that of transformers."""
    lengths = make_lengths(max(2, tokens // 500), tokens)
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
    config._attn_implementation = "sdpa"  # noqa: SLF001
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    embeds = torch.zeros(1, tokens, 1)
    document_map = lengths_to_document_map([lengths.tolist()])
    return (
        lambda: block_mask(document_map),
        lambda: create_causal_mask(config, embeds, None, None, positions),
    )


def compare_masks(tokens: int) -> None:
    """Print time and peak memory of the boolean mask of one row."""
    ours, theirs = mask_builders(tokens)
    assert torch.equal(ours(), theirs())
    mine, other = medians([ours, theirs], rounds=MASK_ROUNDS, calls=1)
    peaks = [
        peak_mb(big, small) for big, small in zip((ours, theirs), mask_builders(64), strict=True)
    ]
    print(
        f"  {tokens:>8,}{mine:9.1f}{other:14.1f}{other / mine:8.1f}{peaks[0]:9.0f}{peaks[1]:14.0f}",
        flush=True,
    )


def peak_mb(work: Callable[[], Any], small: Callable[[], Any]) -> float:
    """Return how far `work` raises the resident memory of a child that has done `small`, in MB."""

    def child(pipe: Any) -> None:
        small()  # what code and libraries need is there after this
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
        before = resident("VmRSS")
        result = work()
        pipe.send(resident("VmHWM") - before)
        del result

    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(send,))
    process.start()
    peak = receive.recv()
    process.join()
    return float(peak)


def resident(key: str) -> float:
    """Read a memory figure of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--masks", type=int, nargs="*", default=[2048, 4096, 8192])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    )
    compare_collators(make_lengths(arguments.documents, arguments.tokens))
    if arguments.masks:
        print("\nboolean 4-D mask of one row: ms, and peak memory in MB")
        print(
            f"  {'tokens':>8}{'ours':>9}{'transformers':>14}{'ratio':>8}{'ours':>9}{'theirs':>14}"
        )
        for tokens in arguments.masks:
            compare_masks(tokens)


if __name__ == "__main__":
    main()
