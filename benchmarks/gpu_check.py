"""One card, one script, under eight minutes: is `neat_varlen` exact in bfloat16 there, and what does it save?

    python benchmarks/gpu_check.py --out model_cards/results/gpu.json

It needs torch and transformers and nothing else, reaches no network, and writes one JSON that
`python benchmarks/gpu_check.py --show FILE` prints as the tables of the README. What a card or an installation
cannot run is named with its reason; a check that fails makes the exit status 1. `--device cpu --tokens 256` runs
the same code on a CPU, for the script's own test.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_neat_packing._compat import environment
from hf_neat_packing.attention import neat_varlen_attention
from hf_neat_packing.attention.kernels import KERNELS, VarlenCall, run
from hf_neat_packing.audit.gpu_tables import gpu_tables

from gpu_speed import measure_steps  # isort: skip  (beside this script)

HALF = torch.bfloat16
SHAPES = {
    "many short": {
        "lengths": [1, 2, 63, 64, 65, 130, 17, 1, 300, 7],
        "heads": (8, 8),
        "dims": (64, 64),
    },
    "grouped heads": {"lengths": [700, 1, 323], "heads": (16, 2), "dims": (128, 128)},
    "window": {"lengths": [400, 90, 534], "heads": (8, 4), "dims": (64, 64), "left": 63},
    "both directions": {
        "lengths": [200, 31, 281],
        "heads": (8, 8),
        "dims": (64, 64),
        "right": None,
    },
    "narrow value": {"lengths": [150, 362], "heads": (4, 4), "dims": (96, 64)},
}


def make_call(shape: dict[str, Any], device: str) -> VarlenCall:
    """Random queries, keys and values of one shape, with boundaries that were not read to the host."""
    generator = torch.Generator().manual_seed(0)
    lengths, (query_heads, key_heads), (dim, value_dim) = (
        shape[k] for k in ("lengths", "heads", "dims")
    )
    sizes = ((query_heads, dim), (key_heads, dim), (key_heads, value_dim))
    query, key, value = (
        torch.randn(sum(lengths), *size, generator=generator).to(device, HALF).requires_grad_()
        for size in sizes
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return VarlenCall(
        query, key, value, offsets, max(lengths), None, shape.get("left"), shape.get("right", 0)
    )


def with_gradients(call: VarlenCall, kernel: str, upstream: Tensor) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    output = run(call, kernel)
    return [output, *torch.autograd.grad(output, call[:3], upstream.to(output.dtype))]


def check_kernel(name: str, shape: dict[str, Any], device: str) -> dict[str, Any]:
    """Compare one kernel with the float64 oracle, and change one document to see that no other moves.

    The allowance is twice the error that one SDPA call per document makes in the same dtype.
    """
    call = make_call(shape, device)
    reason = None if name == "auto" else KERNELS[name][1](call)
    if reason is not None:
        return {"kernel": name, "not_run": reason}
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(run(call, "sdpa").shape, generator=generator).to(device, HALF)
    exact = call._replace(
        **{
            n: getattr(call, n).detach().double().requires_grad_()
            for n in ("query", "key", "value")
        }
    )
    truth = with_gradients(exact, "reference", upstream.double())
    allowed = [
        2 * float((a - b).detach().norm())
        for a, b in zip(with_gradients(call, "sdpa", upstream), truth, strict=True)
    ]
    found = with_gradients(call, name, upstream)
    errors = [float((a - b).detach().norm()) for a, b in zip(found, truth, strict=True)]
    return {
        "kernel": name,
        "error_of_allowed": max(e / a for e, a in zip(errors, allowed, strict=True)),
        "within": all(e <= a for e, a in zip(errors, allowed, strict=True)),
        "isolated": isolated(call, name, shape["lengths"]),
        "control_fails": not isolated(
            call._replace(cu_seqlens=call.cu_seqlens[[0, -1]], max_seqlen=sum(shape["lengths"])),
            name,
            shape["lengths"],
        ),
    }


def isolated(call: VarlenCall, kernel: str, lengths: list[int]) -> bool:
    """Whether another first document moves no bit, and gets no gradient, of the others."""
    first = lengths[0]
    changed = [x.detach().clone() for x in call[:3]]
    for x in changed:
        x[:first] = torch.flip(x[:first], (0,)) + 1
    moved = call._replace(query=changed[0], key=changed[1], value=changed[2])
    with torch.no_grad():
        same = torch.equal(run(call, kernel)[first:], run(moved, kernel)[first:])
    output = run(call, kernel)
    gradients = torch.autograd.grad(output[first:].float().square().sum(), call[:3])
    return same and all(not bool(g[:first].any()) for g in gradients)


class Layer(torch.nn.Module):
    """What an attention function reads from the module that calls it."""

    is_causal = True


def count_synchronisations(device: str) -> dict[str, Any]:
    """Count what makes the host wait inside attention, forward and backward, with boundaries given."""
    if device != "cuda":
        return {"not_run": "only a CUDA device can be waited for"}
    call = make_call(SHAPES["grouped heads"], device)
    query, key, value = (x.detach().transpose(0, 1)[None].requires_grad_() for x in call[:3])
    kwargs = {
        "cu_seq_lens_q": call.cu_seqlens, "cu_seq_lens_k": call.cu_seqlens,
        "max_length_q": call.max_seqlen, "max_length_k": call.max_seqlen,
    }  # fmt: skip

    def step() -> None:
        output, _ = neat_varlen_attention(Layer(), query, key, value, None, **kwargs)
        output.float().sum().backward()

    def waits(function: Callable[[], Any]) -> list[str]:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [str(w.message).splitlines()[0] for w in caught if "synchroniz" in str(w.message)]

    step()
    found = waits(step)
    return {
        "count": len(found),
        "messages": found[:4],
        "control": len(waits(lambda: query.sum().item())),
    }


def check_exactness(device: str) -> list[dict[str, Any]]:
    """Every kernel on every shape; an error of the installation is a result, not the end of the script."""
    results = []
    for title, shape in SHAPES.items():
        for name in ("auto", "fa", "torch_varlen", "sdpa"):
            try:
                result = check_kernel(name, shape, device)
            except Exception as error:
                result = {"kernel": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            results.append({"shape": title, **result})
    return results


def failures(report: dict[str, Any]) -> list[str]:
    """List what went wrong: a check that failed, a control that did not."""
    wrong = []
    for row in report["exactness"]:
        title = f"{row['kernel']}, {row['shape']}"
        if "error" in row:
            wrong.append(f"{title}: {row['error']}")
        elif "not_run" not in row:
            wrong += [
                f"{title}: not {key}"
                for key in ("within", "isolated", "control_fails")
                if not row[key]
            ]
    waits = report["synchronisations"]
    if waits.get("count"):
        wrong.append(f"attention made the host wait {waits['count']} times: {waits['messages']}")
    if waits.get("control") == 0:
        wrong.append("the control of the waits was not counted")
    wrong += [f"step, {s['way']}: {s['wrong']}" for s in report["steps"] if "wrong" in s]
    return wrong


def in_page(page: str, tables: str) -> str:
    """Put the tables where the page says that they belong."""
    before, opening, rest = page.partition("<!-- gpu -->")
    _, closing, after = rest.partition("<!-- /gpu -->")
    if not opening or not closing:
        raise SystemExit(
            "The page has no place for the tables: it needs <!-- gpu --> and <!-- /gpu -->."
        )
    return f"{before}{opening}\n{tables}\n{closing}{after}"


def main() -> None:
    """Run the checks, write the JSON, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="4096,16384,65536", help="row lengths, comma-separated")
    parser.add_argument("--seconds", type=float, default=330.0, help="time for all training steps")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--show", type=Path, help="print the tables of a JSON and stop")
    parser.add_argument(
        "--readme", type=Path, help="with --show: write them into this page instead"
    )
    arguments = parser.parse_args()
    if arguments.show:
        tables = gpu_tables(json.loads(arguments.show.read_text()))
        if arguments.readme is None:
            print(tables)
        else:
            arguments.readme.write_text(in_page(arguments.readme.read_text(), tables))
        return
    start = time.perf_counter()
    rows = [int(n) for n in arguments.tokens.split(",")]
    report: dict[str, Any] = {
        "environment": environment(),
        "command": "python benchmarks/gpu_check.py",
        "exactness": check_exactness(arguments.device),
        "synchronisations": count_synchronisations(arguments.device),
        "steps": [],
    }
    print(f"exactness: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    for tokens in rows:
        report["steps"] += measure_steps(tokens, arguments.device, arguments.seconds / len(rows))
        print(f"{tokens} tokens: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if arguments.out:  # what is measured is kept, whatever happens next
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    report["seconds"] = round(time.perf_counter() - start)
    report["failures"] = failures(report)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(gpu_tables(report))
    print(
        "\n".join(["", *report["failures"]])
        if report["failures"]
        else "\nEvery check holds, every control fails."
    )
    sys.exit(bool(report["failures"]))


if __name__ == "__main__":
    main()
