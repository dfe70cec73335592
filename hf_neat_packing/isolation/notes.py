"""What a report of `isolate` says beside its repairs: what they cost, and what couples documents by design."""

from typing import Final

from torch import nn

from .probe import BATCH_NORMS

_PADDED = (
    "last resort: the whole model runs on one document per padded row, so every slot of padding up to the longest "
    "document of a batch costs as much as a token"
)
LAST_RESORT: Final = {
    "plain": _PADDED,
    "masked": _PADDED,
    "each": "last resort: the whole model runs once per distinct document length, as padding disturbs it too; a batch "
    "costs as many forwards as it has lengths",
}

BALANCE: Final = (
    "the router's balance loss is taken over all documents of a batch and leaves padding out; it couples documents by "
    "design"
)
BALANCE_NOT_ASKED_FOR: Final = (
    "no balance loss of the router is asked for (`output_router_logits`); where one is, it couples documents by "
    "design: it is taken over all tokens of a batch, padding left out"
)
UNSHIFTED: Final = (
    "the loss compares each token with its own label, not with the next one's, whatever its `loss_type` says: the "
    "collator keeps the labels of the data as they are and makes none"
)


def batch_norm_notes(model: nn.Module) -> list[str]:
    """Say where documents share statistics on purpose."""
    notes = []
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        notes.append("batch norm couples all tokens of a batch in training mode by design")
    return notes
