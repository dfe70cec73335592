"""`pack_sdpa_only_model` against `neat_varlen`: one model, one set of weights, two ways to its attention.

    python benchmarks/sdpa_only.py

The model is a small decoder. One copy calls `scaled_dot_product_attention` and is packed by hooks from outside; the
other calls the attention function of the key `neat_varlen` with the kwargs of the batch. Forward and backward
take turns in one process on one thread; the table holds medians. Gradients are compared before a time is printed.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hf_neat_packing._compat import environment
from hf_neat_packing.attention import neat_varlen_attention
from hf_neat_packing.contract import varlen_kwargs_from_document_map
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.hooks.sdpa import pack_sdpa_only_model

GOAL = 1.2


class Attention(nn.Module):
    """Self-attention that reaches SDPA, or `neat_varlen` where it is given boundaries."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, **boundaries: object) -> Tensor:
        """Attend over `[B, S, width]`."""
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        if boundaries:
            output, _ = neat_varlen_attention(self, q, k, v, None, **boundaries)
        else:
            output = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(output.flatten(2))


class Decoder(nn.Module):
    """Layers of attention and MLP over hidden states."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            nn.ModuleDict({"self_attn": Attention(width, heads)}) for _ in range(layers)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )

    def forward(self, hidden_states: Tensor, **boundaries: object) -> Tensor:
        """Run the layers over `[B, S, width]`."""
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            hidden_states = hidden_states + attention["self_attn"](hidden_states, **boundaries)
            hidden_states = hidden_states + mlp(hidden_states)
        return hidden_states


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    lengths: tuple[tuple[int, ...], ...]
    row_length: int
    width: int = 256


def heavy_tailed(total: int, documents: int, seed: int) -> tuple[int, ...]:
    """Cut `total` tokens into `documents` of heavy-tailed length."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(documents).log_normal_(0.0, 0.6, generator=generator)
    lengths = (weights / weights.sum() * total).long().clamp(min=1)
    lengths[0] += total - int(lengths.sum())
    return tuple(lengths.tolist())


CASES = [
    Case("1 row, 8 documents, full", (heavy_tailed(2048, 8, 0),), 2048),
    Case("1 row, 8 documents, padded tail", (heavy_tailed(1800, 8, 0),), 2048),
    Case("4 rows, 4 documents each, padded", tuple(heavy_tailed(480, 4, s) for s in range(4)), 512),
    Case("1 row, 100 documents", (heavy_tailed(2048, 100, 1),), 2048),
    Case("1 row, 8 documents, narrow model", (heavy_tailed(512, 8, 0),), 512, width=64),
]


def measure(case: Case, layers: int, seconds: float) -> tuple[dict[str, float], float]:
    """Time one case; return medians in ms and the largest difference of a gradient at real tokens."""
    torch.manual_seed(0)
    hooked = Decoder(layers, case.width, heads=8 if case.width > 64 else 4)
    direct = copy.deepcopy(hooked)
    document_map = lengths_to_document_map(case.lengths, row_length=case.row_length)
    x = torch.randn(*document_map.shape, case.width)
    upstream = torch.randn_like(x) * (document_map != 0)[..., None]
    pack_sdpa_only_model(hooked)

    def run_hooked() -> None:
        hooked.zero_grad()
        hooked(x, _packed_seq_ids=document_map).backward(upstream)

    def run_direct() -> None:
        direct.zero_grad()
        direct(x, **varlen_kwargs_from_document_map(document_map)).backward(upstream)

    run_hooked()
    run_direct()
    difference = max(
        float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        for ours, theirs in zip(hooked.parameters(), direct.parameters(), strict=True)
    )
    return medians({"hooks": run_hooked, "neat_varlen": run_direct}, seconds), difference


def medians(functions: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Let the functions take turns until the time is up; return the median of each in ms."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["hooks"]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"Forward + backward, {arguments.layers} layers, float32, one thread")
    for column in ("case", "hooks ms", "neat_varlen ms", "hooks / neat_varlen", "max rel. diff"):
        table.add_column(column, justify="left" if column == "case" else "right")
    worst = 0.0
    for case in CASES:
        if arguments.only not in case.name:
            continue
        times, difference = measure(case, arguments.layers, arguments.seconds)
        ratio = times["hooks"] / times["neat_varlen"]
        worst = max(worst, ratio)
        table.add_row(
            case.name, f"{times['hooks']:.1f}", f"{times['neat_varlen']:.1f}", f"{ratio:.2f}", f"{difference:.1e}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"Largest ratio {worst:.2f}; the goal is at most {GOAL}.")
    console.print(str(environment()))


if __name__ == "__main__":
    main()
