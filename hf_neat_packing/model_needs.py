"""What a collator reads from a built model once, because it does not keep the model."""

from typing import Literal

import torch

from .capabilities import model_capabilities
from .contract import (
    DEFAULT_PACKED_SEQUENCE_CONTRACT,
    DOCUMENT_MAP_KEY,
    VARLEN_KEYS,
    PackedMaskType,
    PackedSequenceContract,
    PackingCapabilities,
    as_packing_capabilities,
    resolve_packing_contract,
)
from .errors import UnsupportedModelError
from .isolation import isolation_of
from .label_shift import declared_shift
from .wrappers import forward_parameters, takes_any_keyword, unwrap

_VARLEN = PackingCapabilities(
    packed_mask_type="flash_varlen",
    attention_key="neat_varlen",
    trace=("no model and no contract given: varlen kwargs, for `neat_varlen` and the flash keys",),
)


def resolve_capabilities(
    model: torch.nn.Module | None,
    contract: PackedSequenceContract | None,
    attn_implementation: str | None,
) -> PackingCapabilities:
    """Look up by which contract batches are written: the model's, the given one, or varlen kwargs."""
    if model is not None:
        return model_capabilities(model)
    if contract is None and attn_implementation is None:
        return _VARLEN
    given = DEFAULT_PACKED_SEQUENCE_CONTRACT if contract is None else contract
    return as_packing_capabilities(resolve_packing_contract(given, attn_implementation))


def label_rule(
    model: torch.nn.Module | None, given: bool | None
) -> tuple[bool, Literal["given", "measured", "declared"]]:
    """Say whether the loss shifts, and who says it; the dry run at train start measures what is declared."""
    if given is not None:
        return given, "given"
    isolation = None if model is None else isolation_of(model)
    if isolation is not None and isolation.shifts_labels is not None:
        return isolation.shifts_labels, "measured"
    return declared_shift(None if model is None else unwrap(model)), "declared"


def num_positions(model: torch.nn.Module | None, start: int) -> int | None:
    """Read the size of a position table that does not begin at 0: it holds fewer tokens than it seems to."""
    config = getattr(unwrap(model), "config", None) if model is not None and start else None
    return getattr(config, "max_position_embeddings", None)


def accepted_keys(
    model: torch.nn.Module | None, mask_type: PackedMaskType
) -> frozenset[str] | None:
    """List what a forward without `**kwargs` takes; None where it, or the hooks at its entry, take everything."""
    if model is None or isolation_of(model) is not None:
        return None
    parameters = forward_parameters(unwrap(model))
    if parameters is None or takes_any_keyword(parameters):
        return None
    carriers: list[tuple[str, ...]] = [(DOCUMENT_MAP_KEY,)]
    carriers += [VARLEN_KEYS] if mask_type == "flash_varlen" else [("attention_mask",)]
    if not any(set(keys) <= parameters.keys() for keys in carriers):
        name = type(unwrap(model)).__name__
        raise UnsupportedModelError(
            f"{name}.forward takes {sorted(parameters)}: nothing that could carry the boundaries of a packed row as "
            f"{mask_type}, so its documents would see each other. Accepted: `**kwargs`, or all of "
            f"{' or of '.join(str(list(keys)) for keys in carriers)}. hf_neat_packing.isolate(model) may "
            "help: its hooks take the boundaries at the model's entry."
        )
    return frozenset(parameters)
