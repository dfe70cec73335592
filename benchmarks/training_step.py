"""A whole training step: `neat_varlen` against the same pack under SDPA, and against padded batches of 8.

    python benchmarks/training_step.py

A step is forward, backward and AdamW over all documents of one pack of heavy-tailed lengths. Everything
runs in one process on one thread; what is compared takes turns, and the table holds medians and ratios of
medians. Losses and gradients are compared before a time is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neat_packing._compat import environment
from hf_neat_packing.demo.throughput import Way, ways_of

VOCABULARY = 4096
# Mean length in tokens and spread of its logarithm: texts of a like length, and the functions of Python's
# standard library as the demonstration packs them.
MIXTURES = {"even": (412, 0.6), "functions": (138, 1.15)}


@dataclass(frozen=True)
class Case:
    """One row of the table: documents of log-normal length that fill one pack."""

    tokens: int
    documents: int
    spread: float


def heavy_tailed(case: Case, seed: int) -> list[int]:
    """Cut a pack into documents of log-normal length, in tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(case.documents).log_normal_(0.0, case.spread, generator=generator)
    lengths = (weights / weights.sum() * case.tokens).long().clamp(min=2)
    lengths[0] += case.tokens - int(lengths.sum())
    return [int(length) for length in lengths]


def make_pack(case: Case, seed: int = 0) -> dict[str, list[list[int]]]:
    """Fill the documents with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": [
            torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
            for length in heavy_tailed(case, seed)
        ]
    }


def make_model(tokens: int) -> Any:
    """Build a Llama of 3.9 million random parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
        attn_implementation="neat_varlen",
    )
    return LlamaForCausalLM(config)


def gradients(model: Any, way: Way) -> tuple[float, torch.Tensor]:
    """Give the mean loss over all targets of a way's batches, and every gradient in one vector."""
    model.set_attn_implementation(way.attention)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in way.batches]
    total = 0.0
    for batch, count in zip(way.batches, counts, strict=True):
        loss = model(**batch).loss * (count / sum(counts))
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def make_step(model: Any, way: Way) -> Callable[[], None]:
    """Return one whole training step over a way's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        gradients(model, way)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(case: Case, rounds: int) -> tuple[dict[str, float], dict[str, int], float]:
    """Give seconds a step by way, tokens computed by way, and the largest difference of gradients."""
    model, pack = make_model(case.tokens), make_pack(case)
    ways = ways_of(model, pack, pad_token_id=0)
    found = []
    for way in ways:
        loss, gradient = gradients(model, way)
        model.zero_grad()
        found.append((loss, gradient))
    norm = float(found[0][1].norm())
    difference = max(float((gradient - found[0][1]).norm()) / norm for _, gradient in found)
    # Sums of float32 in another order; a leak between documents is of the size of the gradient.
    assert difference < 1e-3, f"gradients differ by {difference:.1e} of their norm"
    steps = {way.name: make_step(model, way) for way in ways}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    computed = {way.name: sum(b["input_ids"].numel() for b in way.batches) for way in ways}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return medians, computed, difference


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        box=box.SIMPLE, title="Training step of a 3.9 M Llama, float32, one thread: real tokens/s"
    )
    for column in ("T", "lengths", "docs", "neat_varlen", "sdpa", "x", "padded", "x", "computed"):
        table.add_column(column, justify="right", no_wrap=True)
    differences = []
    for tokens, (name, (mean, spread)) in product(arguments.tokens, MIXTURES.items()):
        case = Case(tokens, max(2, round(tokens / mean)), spread)
        seconds, computed, difference = measure(case, arguments.rounds)
        differences.append(difference)
        neat, packed, padded = (tokens / value for value in seconds.values())
        table.add_row(
            f"{tokens:,}",
            name,
            str(case.documents),
            f"{neat:,.0f}",
            f"{packed:,.0f}",
            f"{neat / packed:.1f}",
            f"{padded:,.0f}",
            f"{neat / padded:.1f}",
            f"{computed['sdpa, padded'] / tokens:.1f} T",
        )
    console = Console()
    console.print(table)
    console.print(f"largest difference of gradients, of their norm: {max(differences):.1e}")
    console.print(environment())


if __name__ == "__main__":
    main()
