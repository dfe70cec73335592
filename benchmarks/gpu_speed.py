"""Training steps of one pack on one card, several ways in turn: what `gpu_check.py` measures.

Every way sees the same documents and the same weights, and its loss is compared with that of `neat_varlen`
before its time counts.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking

VOCABULARY = 4096
# A boolean mask of the row squared, and what SDPA makes of it, must leave room for the model.
LARGEST_MASK = 8 * 2**30
# Without its package transformers would look for a kernel on the Hub, and this script reaches no network.
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def documents_of(tokens: int) -> list[list[int]]:
    """Fill a pack with documents of log-normal length (mean about 400 tokens)."""
    generator = torch.Generator().manual_seed(0)
    count = max(2, tokens // 400)
    weights = torch.empty(count).log_normal_(0.0, 1.0, generator=generator)
    lengths = (weights / weights.sum() * tokens).long().clamp(min=2)
    lengths[lengths.argmax()] += tokens - int(lengths.sum())
    return [torch.randint(VOCABULARY, (int(n),), generator=generator).tolist() for n in lengths]


def build(key: str, device: str) -> LlamaForCausalLM:
    """Build a small Llama in bfloat16 with the same random weights for every key."""
    small = device == "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64 if small else 1024, intermediate_size=128 if small else 2816,
        num_hidden_layers=2 if small else 8, num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 4, max_position_embeddings=2**17, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=key)  # noqa: SLF001
    return model.to(device, torch.bfloat16).train()


def on(device: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Move the tensors of a batch, masks by layer type included."""

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: move(v) for k, v in value.items()}
        return value.to(device) if hasattr(value, "to") else value

    return {name: move(value) for name, value in batch.items()}


def padded_batch(documents: list[list[int]]) -> dict[str, Tensor]:
    """One document per row, right padding: what people do without packing."""
    width = max(map(len, documents))
    ids = torch.zeros(len(documents), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
        mask[row, : len(document)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def ways_of(tokens: int, device: str) -> dict[str, Callable[[], Callable[[], float]]]:
    """Name -> what builds a training step that returns its loss."""
    documents = documents_of(tokens)
    features = [{"input_ids": document} for document in documents]

    def packed(key: str, *, compiled: bool = False) -> Callable[[], float]:
        model = build(key, device)
        batch = on(device, DataCollatorForNeatPacking(model)(features))
        return step_of(torch.compile(model, fullgraph=True) if compiled else model, [batch])

    def padded() -> Callable[[], float]:
        model = build("sdpa", device)
        rows = sorted(documents, key=len)
        # Batches of like lengths, of eight documents: kinder to padding than a random order.
        batches = [on(device, padded_batch(rows[i : i + 8])) for i in range(0, len(rows), 8)]
        return step_of(model, batches)

    ways: dict[str, Callable[[], Callable[[], float]]] = {
        "neat_varlen": lambda: packed("neat_varlen"),
        "neat_varlen, compiled": lambda: packed("neat_varlen", compiled=True),
        "sdpa, 4-D mask": lambda: packed("sdpa"),
        "flex_attention, document mask": lambda: packed("flex_attention"),
        "padded, sorted": padded,
    }
    for key in PACKAGES:
        ways[key] = lambda key=key: packed(key)
    return ways


def step_of(model: Any, batches: list[dict[str, Any]]) -> Callable[[], float]:
    """Forward and backward over batches; the loss is the mean over all targets."""
    targets = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            loss = model(**batch, num_items_in_batch=targets).loss
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    return step


def why_not(way: str, tokens: int, device: str) -> str | None:
    """Say why a way is not tried, or None."""
    if "4-D" in way and tokens**2 > LARGEST_MASK:
        return f"the mask alone takes {tokens**2 / 2**30:.0f} GiB"
    if device == "cpu" and ("flex" in way or "compiled" in way or way.startswith("flash")):
        return "measured on a GPU only"
    package = PACKAGES.get(way)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None


def measure_steps(tokens: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """Time every way on one pack, medians, one model in memory at a time.

    Returns:
        One row for each way: tokens of real documents per second, the time against `neat_varlen`'s, peak GiB and
        the loss; or `not_run` with the reason; `wrong` where the loss is another.
    """
    results: list[dict[str, Any]] = []
    ways = ways_of(tokens, device)
    for way, make in ways.items():
        row: dict[str, Any] = {"tokens": tokens, "way": way}
        results.append(row)
        reason = why_not(way, tokens, device)
        if reason is not None:
            row["not_run"] = reason
            continue
        try:
            row |= _timed(make(), tokens, device, seconds / len(ways))
        except Exception as error:  # what this machine lacks is a result
            row["not_run"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        if device == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
    ours = results[0]
    for row in results:
        if "median_s" in row and "median_s" in ours:
            row["ratio"] = row["median_s"] / ours["median_s"]
            # bfloat16 keeps eight bits; the mean of thousands of losses differs by far less than one step.
            if abs(row["loss"] - ours["loss"]) > 0.02 * ours["loss"]:
                row["wrong"] = f"loss {row['loss']:.4f}, neat_varlen has {ours['loss']:.4f}"
    if "not_run" in ours:
        ours["wrong"] = ours["not_run"]
    return results


def _timed(step: Callable[[], float], tokens: int, device: str, seconds: float) -> dict[str, Any]:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    end = time.perf_counter() + seconds
    loss = step()
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and time.perf_counter() < end):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "median_s": median,
        "tokens_per_second": tokens / median,
        "peak_gib": peak,
        "loss": loss,
    }
