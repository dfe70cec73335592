"""Attention alone: `neat_varlen` against SDPA with a 4-D mask, one call per document, and padding.

    python benchmarks/attention.py

Everything runs in one process on one thread; what is compared takes turns, and the table holds medians
and ratios of medians. Results are checked against each other before a time is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hf_neat_packing._compat import environment
from hf_neat_packing.attention import neat_varlen_attention

HEADS, HEAD_DIM = 8, 64


class Module(torch.nn.Module):
    """What an attention function reads from the module that calls it."""

    is_causal = True
    num_key_value_groups = 1


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    lengths: tuple[int, ...]
    dtype: torch.dtype
    against_mask: bool = True


def heavy_tailed(total: int, documents: int, seed: int) -> tuple[int, ...]:
    """Cut `total` tokens into `documents` of heavy-tailed length."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(documents).log_normal_(0.0, 0.6, generator=generator)
    lengths = (weights / weights.sum() * total).long().clamp(min=1)
    lengths[0] += total - int(lengths.sum())
    return tuple(lengths.tolist())


def make_inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Random `[1, heads, tokens, dim]` inputs and an upstream gradient `[1, tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(0)
    total = sum(case.lengths)
    tensors = [
        torch.randn(1, total, HEADS, HEAD_DIM, generator=generator)
        .to(case.dtype)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    ]
    return tensors, torch.randn(1, total, HEADS, HEAD_DIM, generator=generator).to(case.dtype)


def neat(case: Case, tensors: list[Tensor]) -> Tensor:
    """The registered attention function with the kwargs of a packed batch."""
    offsets = torch.tensor([0, *case.lengths]).cumsum(0).int()
    longest = max(case.lengths)
    return neat_varlen_attention(
        Module(), *tensors, None,
        cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest,
    )[0]  # fmt: skip


def masked(case: Case, tensors: list[Tensor], mask: Tensor) -> Tensor:
    """SDPA over the whole row with a 4-D boolean mask."""
    return sdpa(*tensors, attn_mask=mask).transpose(1, 2)


def separate(case: Case, pieces: list[list[Tensor]]) -> list[Tensor]:
    """One causal SDPA call per document, on tensors that were separate from the start."""
    return [sdpa(*piece, is_causal=True).transpose(1, 2) for piece in pieces]


def block_causal(lengths: tuple[int, ...]) -> Tensor:
    """The bool mask `[1, 1, T, T]` of a packed row."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (ids[:, None] == ids[None, :]).tril_()[None, None]


def medians(functions: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Let the functions take turns until the time is up; return the median of each in ms."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def backward(output: Tensor, inputs: list[Tensor], gradient: Tensor) -> None:
    """Run the backward pass as a training step would."""
    for tensor in inputs:
        tensor.grad = None
    output.backward(gradient)


def measure(case: Case, seconds: float) -> tuple[dict[str, float], float]:
    """Time one case and return the medians and the largest difference to the separate calls."""
    tensors, gradient = make_inputs(case)
    pieces = [
        [piece.detach().contiguous().requires_grad_() for piece in document]
        for document in zip(*(x.split(case.lengths, dim=2) for x in tensors), strict=True)
    ]
    gradients = [g.contiguous() for g in gradient.split(case.lengths, dim=1)]
    difference = max(
        float((ours - theirs).detach().abs().max())
        for ours, theirs in zip(
            neat(case, tensors).split(case.lengths, dim=1), separate(case, pieces), strict=True
        )
    )

    def run_separate() -> None:
        for piece, upstream in zip(pieces, gradients, strict=True):
            backward(sdpa(*piece, is_causal=True).transpose(1, 2), piece, upstream)

    functions = {
        "neat_varlen": lambda: backward(neat(case, tensors), tensors, gradient),
        "separate": run_separate,
    }
    if case.against_mask:
        mask = block_causal(case.lengths)
        functions["4-D mask"] = lambda: backward(masked(case, tensors, mask), tensors, gradient)
    if len(set(case.lengths)) == 1:
        rows, width = len(case.lengths), case.lengths[0]
        padded = [
            x.detach()[0].unflatten(1, (rows, width)).transpose(0, 1).contiguous().requires_grad_()
            for x in tensors
        ]
        upstream = gradient[0].unflatten(0, (rows, width)).contiguous()
        functions["padded"] = lambda: backward(
            sdpa(*padded, is_causal=True).transpose(1, 2), padded, upstream
        )
    return medians(functions, seconds), difference


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        Case("T=8192, 21 documents", heavy_tailed(8192, 21, 0), torch.float32),
        Case("T=8192, 21 documents", heavy_tailed(8192, 21, 0), torch.bfloat16),
        Case("T=2048, 8 documents", heavy_tailed(2048, 8, 0), torch.float32),
        Case("T=2048, 8 documents", heavy_tailed(2048, 8, 0), torch.bfloat16),
        Case("1000 documents of 8", (8,) * 1000, torch.float32, against_mask=False),
        Case(
            "500 documents of 1 to 40",
            heavy_tailed(8192, 500, 1),
            torch.float32,
            against_mask=False,
        ),
    ]
    table = Table(title=f"Attention forward + backward, {HEADS} heads of {HEAD_DIM}, one thread")
    for column in (
        "case",
        "dtype",
        "neat_varlen ms",
        "4-D mask x",
        "separate calls x",
        "padded x",
        "max diff",
    ):
        table.add_column(column, justify="left" if column in ("case", "dtype") else "right")
    for case in cases:
        if arguments.only not in case.name:
            continue
        times, difference = measure(case, arguments.seconds)
        ours = times["neat_varlen"]
        ratio = {
            name: f"{times[name] / ours:.2f}" if name in times else ""
            for name in ("4-D mask", "separate", "padded")
        }
        table.add_row(
            case.name, str(case.dtype).removeprefix("torch."), f"{ours:.1f}",
            ratio["4-D mask"], ratio["separate"], ratio["padded"], f"{difference:.1e}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print("x = time of the other / time of neat_varlen: above 1, neat_varlen is faster.")
    console.print(str(environment()))


if __name__ == "__main__":
    main()
