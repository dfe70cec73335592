"""Whether padding counts in the balance loss of a router, by measurement."""

from typing import Any

import torch

from ..hooks.routing import asks_for_router_logits, has_router
from .probe import Probe
from .record import relative_difference
from .samples import Sample

_TAIL = 6


def moved_by_padding(probe: Probe) -> float | None:
    """Give a row a padding tail and measure by how much its balance loss moves.

    Args:
        probe: of the model.

    Returns:
        The change relative to the loss; infinite where the forward raises; None where the config asks for no such
        loss. (Asking for it leaves transformers' own recorders on the model.)
    """
    if not (has_router(probe.inner) and asks_for_router_logits(probe.inner, {})):
        return None
    sample = probe.sample()
    try:
        losses = [_balance_loss(probe, row) for row in (sample, _padded(probe, sample))]
    except Exception:
        return float("inf")
    if not all(isinstance(loss, torch.Tensor) for loss in losses):
        return None
    return relative_difference(losses[1], losses[0])


def _balance_loss(probe: Probe, sample: Sample) -> Any:
    inputs = probe.packed_inputs(sample, every_key=True)
    with torch.no_grad():
        return getattr(probe.model(**inputs), "aux_loss", None)


def _padded(probe: Probe, sample: Sample) -> Sample:
    """Add a tail of tokens that belong to no document."""
    tail = probe.sample(((_TAIL,),)).rows[0][0]
    numbers = torch.cat([sample.document_map, torch.zeros(1, _TAIL, dtype=torch.int64)], dim=1)
    return Sample(((*sample.rows[0], tail),), numbers)
