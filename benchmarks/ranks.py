"""Time that ranks lose to the slowest of them in each step: packs dealt plainly, and dealt by cost.

    python benchmarks/ranks.py                                     # planned costs, any number of ranks
    torchrun --nproc_per_node 2 benchmarks/ranks.py                # and measured, one process a rank

Plain is what a `DistributedSampler` does: packs in random order, dealt in turn. By cost is
`RankBalancedPackSampler`: the same random draws, and inside each update packs of like cost in one step. Both
deal the same packs of the same plan.

Lost is the sum over steps of the slowest rank, over the sum of the means, less 1. The first table takes the
costs that the sampler plans with; the second takes CPU seconds of forward and backward in real processes, so
that other work on the machine disturbs it little. Ranks meet in a barrier after each step.
"""

import argparse
import os
import time
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking, RankBalancedPackSampler, pack_dataset
from hf_neat_packing._compat import environment
from hf_neat_packing.planning import imbalance, pack_costs, plan_packing

# Median length in tokens and spread of its logarithm.
MIXTURES = {"chat": (350, 1.0), "long tail": (350, 1.6)}
VOCABULARY = 512


class Case(NamedTuple):
    """One row of the table of planned costs."""

    mixture: str
    max_length: int
    hidden_size: int
    ranks: int


class Lost(NamedTuple):
    """Share of time lost to the slowest rank of each step."""

    plain: float
    by_cost: float


def draw_lengths(mixture: str, number: int, max_length: int, seed: int = 0) -> Any:
    """Draw document lengths of a mixture, none longer than a pack."""
    median, spread = MIXTURES[mixture]
    drawn = np.random.default_rng(seed).lognormal(np.log(median), spread, number)
    return np.clip(drawn, 2, max_length).astype(np.int64)


def dealt_by_cost(costs: Any, ranks: int, updates: int) -> Any:
    """Costs in the order in which the sampler deals them: rank after rank, step after step."""
    options = {"num_ranks": ranks, "batches_per_update": updates, "drop_last": True}
    given = [list(RankBalancedPackSampler(costs, rank=rank, **options)) for rank in range(ranks)]
    return costs[np.array(given)[:, :, 0].T.ravel()]


def planned(case: Case, *, documents: int = 50_000, updates: int = 8) -> Lost:
    """Compare both ways on planned costs."""
    lengths = draw_lengths(case.mixture, documents, case.max_length)
    plan = plan_packing(lengths, case.max_length)
    costs = pack_costs(plan.lengths, plan.offsets, hidden_size=case.hidden_size)
    shuffled = np.random.default_rng(1).permutation(costs)
    return Lost(
        imbalance(shuffled, case.ranks),
        imbalance(dealt_by_cost(costs, case.ranks, updates), case.ranks),
    )


def measured(*, max_length: int, hidden_size: int, steps: int, updates: int) -> Lost:
    """Compare both ways by the CPU time of this process and the others; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = draw_lengths("long tail", 60 * steps * ranks, max_length)
    documents = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in lengths.tolist()]})
    packs = pack_dataset(documents, max_length=max_length)
    balanced = RankBalancedPackSampler(
        packs, num_ranks=ranks, rank=rank, batches_per_update=updates, hidden_size=hidden_size
    )
    drawn = np.random.default_rng(1).permutation(len(packs)).tolist()
    plain = [[pack] for pack in drawn[rank::ranks]]
    model = small_llama(hidden_size)
    _seconds(model, packs, plain[:2])  # the first forward prepares much
    return Lost(*(_lost(_seconds(model, packs, list(way)[:steps])) for way in (plain, balanced)))


def small_llama(hidden_size: int) -> LlamaForCausalLM:
    """Make a model of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="neat_varlen",
    )
    return LlamaForCausalLM(config)


def _seconds(model: LlamaForCausalLM, packs: Any, batches: list[list[int]]) -> list[float]:
    """CPU seconds of this rank's forward and backward in each step."""
    loader = DataLoader(packs, batch_sampler=batches, collate_fn=DataCollatorForNeatPacking(model))
    seconds = []
    for batch in loader:
        began = time.process_time()
        model(**batch, use_cache=False).loss.backward()
        seconds.append(time.process_time() - began)
        model.zero_grad()
        dist.barrier()
    return seconds


def _lost(own: list[float]) -> float:
    """Bring the seconds of all ranks together."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return imbalance(np.array(everyone).T.ravel(), dist.get_world_size())


def show(title: str, rows: list[tuple[str, Lost]]) -> None:
    """Print a table."""
    table = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for name in ("packs", "lost, dealt plainly", "lost, dealt by cost"):
        table.add_column(name)
    for name, lost in rows:
        table.add_row(name, f"{lost.plain:.1%}", f"{lost.by_cost:.1%}")
    Console(width=140).print(table)


def main() -> None:
    """Print the table of planned costs and, under torchrun, that of measured ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=16, help="measured steps of each way")
    parser.add_argument("--updates", type=int, default=8, help="steps in one optimizer update")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    if int(os.environ.get("RANK", "0")) == 0:
        rows = [
            (
                f"{mixture}, {max_length:,} tokens, width {hidden_size:,}, {ranks} ranks",
                planned(
                    Case(mixture, max_length, hidden_size, ranks),
                    documents=arguments.documents,
                    updates=arguments.updates,
                ),
            )
            for mixture in MIXTURES
            for max_length, hidden_size in ((4096, 2048), (32_768, 2048))
            for ranks in (2, 8, 64)
        ]
        Console(width=140).print(environment())
        show("Planned costs", rows)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        size = {"max_length": 2048, "hidden_size": 64}
        lost = measured(**size, steps=arguments.steps, updates=arguments.updates)
        if dist.get_rank() == 0:
            name = f"long tail, 2,048 tokens, width 64, {dist.get_world_size()} ranks"
            show("Measured CPU seconds of forward and backward", [(name, lost)])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
