"""One dry run of two documents, which shows whether a built model keeps them apart.

Being able to take boundaries is no proof of reading them: many architectures store an attention key
and never call it, and `**kwargs` swallows everything. So the model runs a row of two documents, and again with all
tokens of the first one changed. No attention layer may answer differently for the second document.

Legend: `S` tokens in a row; the first document is `A`, the second `B`.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .contract import DOCUMENT_MAP_KEY, VARLEN_KEYS
from .errors import NeatPackingError, UnsupportedModelError
from .layer_masks import text_config
from .wrappers import forward_parameters, release_gathered_weights, unwrap

LENGTHS = (6, 7)
FLOAT32_EPS = torch.finfo(torch.float32).eps


class LayerProof(NamedTuple):
    """What one attention layer did in the dry run.

    Attributes:
        name: the layer's name in the unwrapped model.
        saw_boundaries: whether offsets or a mask came to it by name.
        change_before: largest change of its input in the unchanged document, made by what came before it.
        change_in_first: largest change of its output in the changed document.
        change_in_second: largest change in the other one; rounding at most.
        bound: what rounding may change.
    """

    name: str
    saw_boundaries: bool
    change_before: float
    change_in_first: float
    change_in_second: float
    bound: float


class IsolationProof(NamedTuple):
    """What the dry run of a model showed.

    Attributes:
        layers: the attention layers that ran, in order.
        change_in_second: largest change of the model's output for the unchanged document.
        distance_from_alone: largest difference between the second document in the pack and alone.
    """

    layers: tuple[LayerProof, ...]
    change_in_second: float
    distance_from_alone: float


class _Call(NamedTuple):
    name: str
    saw_boundaries: bool
    inputs: Tensor | None
    output: Tensor


def prove_isolation(model: nn.Module, collator: Any) -> IsolationProof:
    """Run two documents in one row and raise unless they keep apart.

    Three short forwards without gradients, in evaluation mode; the training mode of every module and the random
    state are as before.

    Args:
        model: the model as it is trained, in its wrappers.
        collator: a `DataCollatorForNeatPacking`; its row length and padding are left aside.

    Returns:
        What was measured.

    Raises:
        UnsupportedModelError: naming the class, the first layer that mixes documents, and what to do.
    """
    collator = copy.copy(collator)
    collator.row_length = collator.pad_to_multiple_of = None
    first, other, second = _documents(unwrap(model))
    # Compiled code would keep the recorders of this run.
    with _evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        packed, packed_calls = _run(model, collator, [first, second])
        changed, changed_calls = _run(model, collator, [other, second])
        alone, _ = _run(model, collator, [second])
    layers = tuple(_layers(packed_calls, changed_calls))
    name = type(unwrap(model)).__name__
    for layer in layers:
        _require_isolation(name, layer)
    bound = _rounding(packed, len(layers), packed_calls)
    second_packed, second_alone = _of_last(name, packed, 2), _of_last(name, alone, 1)
    leak = _largest(second_packed - _of_last(name, changed, 2))
    if leak > bound:
        raise _other_leak(name, leak, bound, "in its output, after all attention layers")
    distance = _largest(second_packed - second_alone)
    if distance > bound:
        raise UnsupportedModelError(
            f"{name}: a document inside a row differs from the same document alone by {distance:.3g} (rounding is "
            f"{bound:.3g}), though nothing leaks. Its positions probably count through the row: the model makes them "
            "inside, or by distances that do not restart. `hf_neat_packing.isolation.isolate(model)` may repair it; "
            "or train this model unpacked."
        )
    return IsolationProof(layers, leak, distance)


def _other_leak(model: str, leak: float, bound: float, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model}: the second document of a row answers to the first, {where} (it moves by {leak:.3g} when the first "
        f"changes, rounding moves it by {bound:.3g}), though no attention layer did it. Something else carries state "
        "from token to token: recurrent layers or convolutions. `hf_neat_packing.isolation.isolate(model)` keeps "
        "documents apart there with hooks; or train this model unpacked."
    )


def _of_last(model: str, output: Tensor, documents: int) -> Tensor:
    """The last document's part of an output, per token `[1, S, ...]` or per document `[N, ...]`."""
    if output.ndim >= 2 and output.shape[:2] == (1, sum(LENGTHS[-documents:])):
        return output[:, -LENGTHS[1] :].float()
    if output.shape[0] == documents:
        return output[-1:].float()
    raise UnsupportedModelError(
        f"{model} answers with shape {list(output.shape)} for a row of {documents} documents: once for the row, not "
        "once for each document or token. Its head pools over the row; train it unpacked."
    )


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


def _documents(model: nn.Module) -> tuple[list[int], list[int], list[int]]:
    """Two documents and a changed first one, of ordinary tokens: ids that the config gives no role are taken."""
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


def _run(model: nn.Module, collator: Any, documents: list[list[int]]) -> tuple[Tensor, list[_Call]]:
    """Run one row; return the model's first output `[1, S, ...]` and what the attention layers gave."""
    batch = collator([[{"input_ids": ids} for ids in documents]])
    batch.pop("labels", None)
    inner = unwrap(model)
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    batch = {name: _to(value, device) for name, value in batch.items()}
    if "use_cache" in (forward_parameters(inner) or {}):
        batch["use_cache"] = False
    calls: list[_Call] = []
    handles = [
        module.register_forward_hook(_recorder(name, calls), with_kwargs=True)
        for name, module in attention_layers(inner)
    ]
    try:
        output = _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    first = output if isinstance(output, Tensor) else output[0]
    return first.detach(), calls


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


def _recorder(name: str, calls: list[_Call]) -> Any:
    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        inputs = next((x for x in (*args, kwargs.get("hidden_states")) if _over_row(x)), None)
        mask = kwargs.get("attention_mask")
        saw = (
            mask is not None or DOCUMENT_MAP_KEY in kwargs or all(k in kwargs for k in VARLEN_KEYS)
        )
        # Only what runs over the row itself: a vision tower has tokens of its own.
        if _over_row(tensor):
            calls.append(_Call(name, saw, inputs, tensor.detach()))

    return record


def _over_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 3 and sum(LENGTHS) in value.shape[:2]


def _difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Largest change in the first and in the second document."""
    axis = before.shape.index(sum(LENGTHS))
    first, second = (before.float() - after.float()).split(list(LENGTHS), axis)
    return _largest(first), _largest(second)


def _layers(packed: list[_Call], changed: list[_Call]) -> Iterator[LayerProof]:
    for depth, (before, after) in enumerate(zip(packed, changed, strict=True)):
        upstream = 0.0
        if before.inputs is not None and after.inputs is not None:
            upstream = _difference(before.inputs, after.inputs)[1]
        first, second = _difference(before.output, after.output)
        bound = _rounding(before.output, depth, packed)
        yield LayerProof(before.name, before.saw_boundaries, upstream, first, second, bound)


def _require_isolation(model: str, layer: LayerProof) -> None:
    if layer.change_in_second > layer.bound:
        if layer.change_before > layer.bound:
            where = f"before attention layer {layer.name!r}"
            raise _other_leak(model, layer.change_before, layer.bound, where)
        saw = (
            "The boundaries came to it and were not used"
            if layer.saw_boundaries
            else "No boundaries came to it by name"
        )
        raise UnsupportedModelError(
            f"{model}: attention layer {layer.name!r} lets the second document of a row see the first (its output "
            f"moves by {layer.change_in_second:.3g} when the first changes, rounding moves it by {layer.bound:.3g}). "
            f"{saw}, so packed training would mix documents. Build the collator from this model; if it still "
            "mixes, `hf_neat_packing.isolation.isolate(model)` keeps documents apart with hooks."
        )
    if layer.change_in_first == 0 and not layer.saw_boundaries:
        raise UnsupportedModelError(
            f"{model}: attention layer {layer.name!r} gives the same output whatever it reads, and no boundaries came "
            "to it by name, so nothing shows that it keeps documents apart. Check it with `hf-neat-packing audit`."
        )


def _rounding(output: Tensor, depth: int, calls: list[_Call]) -> float:
    """What rounding may change at a depth: two sums per layer, each rounded at the size of the output.

    A sum of `n` terms is off by about `sqrt(n)` roundings of float32, in which it is kept, and one rounding of its own
    dtype. A dense model changes nothing at all when other tokens do; experts regroup their tokens.
    """
    dtypes = {output.dtype, *(call.output.dtype for call in calls)}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    if output.is_cuda and torch.get_float32_matmul_precision() != "highest":
        coarsest = max(coarsest, torch.finfo(torch.float16).eps)
    width = calls[-1].output.shape[-1] if calls else output.shape[-1]
    return 2 * (depth + 1) * (coarsest + math.sqrt(width) * FLOAT32_EPS) * _largest(output)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module has the mode that it had, and FSDP2 no gathered weights."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        release_gathered_weights(model)
        for module, mode in modes:
            module.training = mode
