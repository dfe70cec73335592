"""One dry run of two documents, which shows whether a built model keeps them apart.

Being able to take boundaries is no proof of reading them: many architectures store an attention key
and never call it, and `**kwargs` swallows everything. So the model runs a row of two documents, and again with all
tokens of the first one changed. No attention layer may answer differently for the second document.

Legend: `S` tokens in a row; the first document is `A`, the second `B`.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import ContractError, UnsupportedModelError
from .hooks.routing import asks_for_router_logits, has_router, routing_hooks
from .isolation import isolation_of
from .isolation.conditions import evaluating
from .isolation.long_range import rotary_limit
from .label_shift import shift_of_losses
from .two_documents import LENGTHS, AttentionCall, run_row, two_documents
from .wrappers import unwrap

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
        shifts_labels: whether the model's loss compares a token with the next one's label; None where no loss
            reads the labels of tokens.
        answers_per_token: whether the model answers for each token, not once for each document.
    """

    layers: tuple[LayerProof, ...]
    change_in_second: float
    distance_from_alone: float
    shifts_labels: bool | None
    answers_per_token: bool = True


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
    # Labels of its own are given below.
    collator.loss_per, collator.mask_tokens = "token", None
    first, other, second = two_documents(unwrap(model))
    # Compiled code would keep the recorders of this run.
    with evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        changed, changed_calls, _ = run_row(model, collator, [other, second])
        # Heads over whole documents read other labels, and some write down what kind they saw.
        by_token = changed.ndim >= 3 and changed.shape[1] == sum(LENGTHS)
        places = (-1, 0) if by_token else (None, None)
        packed, packed_calls, last_loss = run_row(model, collator, [first, second], label=places[0])
        alone, _, first_loss = run_row(model, collator, [second], label=places[1])
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
    shift = shift_of_losses(first_loss, last_loss)
    return IsolationProof(layers, leak, distance, shift, by_token)


def require_label_rule(model: nn.Module, collator: Any, shifts: bool | None) -> None:
    """Raise unless a collator treats the label of each document's first token as the model's loss needs it.

    Args:
        model: the model, in its wrappers.
        collator: a `DataCollatorForNeatPacking`; what it was told by name is not questioned.
        shifts: what the dry run measured.

    Raises:
        ContractError: labels that would be lost, or compared across documents, or that nothing is known about.
    """
    if collator.label_rule == "given" or shifts == collator.shifts_labels:
        return
    name = type(unwrap(model)).__name__
    if shifts is None:
        raise ContractError(
            f"{name} returns no loss that reads the labels of its tokens, so nothing shows whether the loss that "
            "trains it compares a token with its own label or with the next one's, and the label of each document's "
            "first token would be lost, or learnt by the document before it. Say it: "
            "`DataCollatorForNeatPacking(model, shifted_labels=True)` where logits predict the next token, else False."
        )
    if shifts:
        raise ContractError(
            f"The loss of {name} compares each token with the next one's label, and the collator keeps the label of "
            "each document's first token: the document before it would learn to predict it. Write "
            "`DataCollatorForNeatPacking(model, shifted_labels=True)`."
        )
    declared = getattr(unwrap(model), "loss_type", None)
    raise ContractError(
        f"The loss of {name} compares each token with its own label, not with the next one's, though its `loss_type` "
        f"is {declared!r}: the collator would take away the label of each document's first token, and make labels "
        "that ask for the token itself. Write `DataCollatorForNeatPacking(model, shifted_labels=False)` and give the "
        "data a `labels` column that is shifted already."
    )


def require_known_rotary_limit(model: nn.Module, collator: Any) -> None:
    """Raise where rotary tables follow the longest document and the collator does not know from which length on.

    Args:
        model: the model, in its wrappers.
        collator: a `DataCollatorForNeatPacking`; one that knows the length refuses batches that reach it.

    Raises:
        ContractError: naming the class and the length.
    """
    limit = rotary_limit(unwrap(model)) if isolation_of(model) is None else None
    if limit is None or limit == collator.rotary_limit:
        return
    raise ContractError(
        f"{limit.model} scales its rotary table for documents of more than {limit.length} tokens, and the collator "
        "does not know it: one long document would change the others of its batch. Write `isolate(model)`, which gives "
        "each document its own table; or build the collator from this model, `DataCollatorForNeatPacking(model)`, "
        "which refuses such batches."
    )


def require_balance_without_padding(model: nn.Module, collator: Any) -> None:
    """Raise where a router's balance loss is trained and would count padding, which no output shows.

    Args:
        model: the model, in its wrappers.
        collator: a `DataCollatorForNeatPacking`.

    Raises:
        ContractError: naming the class and the two ways out.
    """
    inner = unwrap(model)
    if not (has_router(inner) and asks_for_router_logits(inner, {})) or routing_hooks(inner):
        return
    pads = (
        collator.row_length is not None
        or collator.pad_to_multiple_of is not None
        or collator.rows == "packs"
    )
    # A mask of another form than 0 and 1 `[B, S]` is no padding mask, and the loss reads it as one.
    if not pads and collator.capabilities.packed_mask_type == "flash_varlen":
        return
    raise ContractError(
        f"{type(inner).__name__} has `output_router_logits = True`, so the balance loss of its router is trained, and "
        "the batch has no padding mask for it: padding would count, or the loss raise on a mask of another form. Write "
        "`isolate(model)` or `configure_packing_for_models([model])` before training: their hooks leave padding out. "
        "Or `model.config.output_router_logits = False`."
    )


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


def _difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Largest change in the first and in the second document."""
    axis = before.shape.index(sum(LENGTHS))
    first, second = (before.float() - after.float()).split(list(LENGTHS), axis)
    return _largest(first), _largest(second)


def _layers(packed: list[AttentionCall], changed: list[AttentionCall]) -> Iterator[LayerProof]:
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


def _rounding(output: Tensor, depth: int, calls: list[AttentionCall]) -> float:
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
