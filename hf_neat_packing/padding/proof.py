"""A few short rows, padded and packed, which show whether a hooked model answers for each as for it alone.

Legend: `B` rows, `W` their width, `N` documents.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..collator import DataCollatorForNeatPacking
from ..errors import NeatPackingError, UnsupportedModelError
from ..isolation.conditions import plain_ids, undisturbed
from ..two_documents import attention_layers
from ..wrappers import unwrap

LENGTHS = (5, 1, 8, 3)


def prove_padding_free(
    model: nn.Module, collator: DataCollatorForNeatPacking | None = None
) -> float:
    """Run rows padded on the right, on the left and packed, and raise unless they answer as alone.

    About ten forwards of a few tokens without gradients, in evaluation mode; modes and random state are as before.

    Args:
        model: the model with its hooks.
        collator: where the model answers once a document: writes the packed batch. A model that answers once a
            row is not tried with padding on the left: a head that reads a row's first token reads padding there.

    Returns:
        The largest difference from a row alone.

    Raises:
        UnsupportedModelError: naming the class and what differs.
    """
    inner = unwrap(model)
    name = type(inner).__name__
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    ids = plain_ids(inner)
    generator = torch.Generator().manual_seed(0)
    rows = [ids[torch.randint(len(ids), (n,), generator=generator)].to(device) for n in LENGTHS]
    with undisturbed(inner), torch.no_grad():
        alone = [answer(name, model, {"input_ids": row[None]}) for row in rows]
        found = {"padded on the right": _padded(name, model, rows, left=False)}
        if alone[0].ndim > 2:
            found["padded on the left"] = _padded(name, model, rows, left=True)
        if collator is not None:
            batch = collator([{"input_ids": row.cpu()} for row in rows])
            batch = {key: to_device(value, device) for key, value in batch.items()}
            found["packed into one row"] = list(answer(name, model, batch))
    bound = _rounding(inner, alone)
    worst = 0.0
    for how, answers in found.items():
        for length, given, expected in zip(LENGTHS, answers, alone, strict=False):
            expected = expected[0]
            same = given.shape == expected.shape and len(answers) == len(rows)
            distance = float((given.float() - expected.float()).abs().max()) if same else math.inf
            worst = max(worst, distance)
            if not distance <= bound:
                raise UnsupportedModelError(
                    f"{name}: the answer for a row of {length} tokens, {how} with others, is {distance:.3g} away from "
                    f"that for the same row alone (rounding is {bound:.3g}; inf: in another shape). Its layers may "
                    "need `hf_neat_packing.isolate(model.base_model)` first; or its head reads more than its own row. "
                    "Run this model on padded rows without these hooks."
                )
    return worst


def _padded(name: str, model: nn.Module, rows: list[Tensor], *, left: bool) -> list[Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), int(rows[0][0]), device=rows[0].device)
    mask = torch.zeros_like(ids)
    places = [slice(width - len(r), width) if left else slice(0, len(r)) for r in rows]
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[index, place], mask[index, place] = row, 1
    pad = getattr(getattr(unwrap(model), "config", None), "pad_token_id", None)
    ids = ids.masked_fill(mask == 0, pad or 0)
    answers = answer(name, model, {"input_ids": ids, "attention_mask": mask})
    if answers.ndim < 3:
        return list(answers)
    return [answers[index, place] for index, place in enumerate(places)]


def answer(name: str, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Run a model without labels and return the first of its outputs.

    Raises:
        UnsupportedModelError: naming the class and what it raised.
    """
    batch.pop("labels", None)
    try:
        output = model(**batch)
    except (NeatPackingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot run a few short rows (keys {sorted(batch)}): {type(error).__name__}: {error} Accepted: a "
            "model whose layers take packed rows; `hf_neat_packing.isolate(model.base_model)` may repair it."
        ) from error
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


def _rounding(model: nn.Module, answers: list[Tensor]) -> float:
    """What rounding may change: two sums a layer, each rounded at the size of the answer."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | {answers[0].dtype}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    width = max((p.shape[-1] for p in model.parameters() if p.ndim > 1), default=1)
    largest = max(float(a.abs().max()) for a in answers)
    sums = 2 * (len(attention_layers(model)) + 1)
    return sums * (coarsest + math.sqrt(width) * torch.finfo(torch.float32).eps) * largest


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, also those in dictionaries of masks."""
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value
