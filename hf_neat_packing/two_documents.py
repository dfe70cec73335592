"""Rows of two short documents, run through a model and recorded: what a dry run needs of a model.

Legend: `S` tokens in a row.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .contract import DOCUMENT_MAP_KEY, VARLEN_KEYS
from .errors import NeatPackingError, UnsupportedModelError
from .label_shift import one_label
from .layer_masks import text_config
from .wrappers import forward_parameters, unwrap

LENGTHS = (3, 4)
"""Tokens of the two documents; their sum is prime, so that no other dimension has it."""


class AttentionCall(NamedTuple):
    """One call of an attention layer over a row.

    Attributes:
        name: the layer's name in the unwrapped model.
        saw_boundaries: whether offsets or a mask came to it by name.
        inputs: its hidden states, `S` in the first or second place, or None where it takes none.
        output: what it gave, alike.
    """

    name: str
    saw_boundaries: bool
    inputs: Tensor | None
    output: Tensor


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the innermost attention modules of a model, by the naming that transformers keeps everywhere."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        or isinstance(getattr(module, "is_causal", None), bool)
    ]
    return [
        (name, module)
        for name, module in found
        if not any(other.startswith(f"{name}.") for other, _ in found) and name
    ]


def two_documents(model: nn.Module) -> tuple[list[int], list[int], list[int]]:
    """Draw two documents and a changed first one, of ordinary tokens: ids that the config gives no role."""
    config = getattr(model, "config", None)
    text = text_config(config)
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
        size = embedding.num_embeddings if embedding is not None else 2
    special = {
        value
        for part in (config, text)
        for name, value in (vars(part) if part is not None else {}).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(size, 4096)) if token not in special]
    if len(ordinary) < 2:
        ordinary = [0, 1]
    generator = torch.Generator().manual_seed(0)
    step = int(torch.randint(1, len(ordinary), (1,), generator=generator))

    def draw(length: int) -> list[int]:
        return torch.randint(len(ordinary), (length,), generator=generator).tolist()

    first, second = draw(LENGTHS[0]), draw(LENGTHS[1])
    other = [(index + step) % len(ordinary) for index in first]
    return tuple([ordinary[i] for i in ids] for ids in (first, other, second))  # type: ignore[return-value]


class RowRun(NamedTuple):
    """One forward of a row.

    Attributes:
        output: the model's first output after its loss, `[1, S, ...]` or `[documents, ...]`.
        calls: of its attention layers, in order.
        loss: what the model made of its labels, or None.
    """

    output: Tensor
    calls: list[AttentionCall]
    loss: Any


def run_row(
    model: nn.Module, collator: Any, documents: list[list[int]], *, label: int | None = None
) -> RowRun:
    """Run one row of documents.

    Args:
        model: the model, in its wrappers.
        collator: makes the batch.
        documents: token ids of each.
        label: place of the one token that gets a label where the model takes labels, 0 or -1.

    Raises:
        UnsupportedModelError: the forward raises.
    """
    batch = collator([[{"input_ids": ids} for ids in documents]])
    batch.pop("labels", None)
    inner = unwrap(model)
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    batch = {name: _to(value, device) for name, value in batch.items()}
    if "use_cache" in (forward_parameters(inner) or {}):
        batch["use_cache"] = False
    if label is not None and "labels" in (forward_parameters(inner) or {}):
        labelled = batch | {"labels": one_label(batch["input_ids"], label)}
        # What labels alone make it raise is no matter of packing.
        with suppress(Exception):
            return _recorded(model, labelled)
    return _recorded(model, batch)


def _recorded(model: nn.Module, batch: dict[str, Any]) -> RowRun:
    inner = unwrap(model)
    calls: list[AttentionCall] = []
    handles = [
        module.register_forward_hook(_recorder(name, calls), with_kwargs=True)
        for name, module in attention_layers(inner)
    ]
    try:
        output = _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(output, Tensor):
        return RowRun(output.detach(), calls, None)
    values = output.values() if isinstance(output, Mapping) else output
    # A loss comes first, and is no tensor over tokens.
    first = next(value for value in values if isinstance(value, Tensor) and value.ndim > 0)
    return RowRun(first.detach(), calls, getattr(output, "loss", None))


def _call(model: nn.Module, batch: dict[str, Any]) -> Any:
    try:
        return model(**batch)
    except (NeatPackingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} cannot run a packed row of two documents (keys {sorted(batch)}): "
            f"{type(error).__name__}: {error} Training would stop at the first batch. Accepted: a model whose "
            "layers take these keys. `hf_neat_packing.isolation.isolate(model)` may repair it; or train it unpacked."
        ) from error


def _recorder(name: str, calls: list[AttentionCall]) -> Any:
    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        inputs = next((x for x in (*args, kwargs.get("hidden_states")) if _over_row(x)), None)
        mask = kwargs.get("attention_mask")
        saw = (
            mask is not None or DOCUMENT_MAP_KEY in kwargs or all(k in kwargs for k in VARLEN_KEYS)
        )
        # Only what runs over the row itself: a vision tower has tokens of its own.
        if _over_row(tensor):
            calls.append(AttentionCall(name, saw, inputs, tensor.detach()))

    return record


def _over_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 3 and sum(LENGTHS) in value.shape[:2]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value
