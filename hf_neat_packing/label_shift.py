"""Whether a model's loss compares a token with the next one's label or with its own, found by running it.

Class names and `loss_type` do not tell: decoders of the BART family, XLM and XLNet are called causal and take
the loss of unshifted labels. So one token alone gets a label, the first one: a loss that shifts never
reads it.

Legend: `S` tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .loss_labels import IGNORE_INDEX, UNSHIFTED_LOSSES

# In every head but that of one class, and no usual id of padding.
_LABEL = 1


def declared_shift(model: Any) -> bool:
    """Read from `loss_type` whether the loss of a model shifts; most do.

    Args:
        model: the unwrapped model, or None.
    """
    return getattr(model, "loss_type", None) not in UNSHIFTED_LOSSES


def one_label(input_ids: Tensor, place: int) -> Tensor:
    """Return labels `[1, S]` that are left out everywhere but at one token.

    Args:
        input_ids: int64 `[1, S]`.
        place: the token, 0 or -1.
    """
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, place] = _LABEL
    return labels


def shift_of_losses(first: Any, last: Any) -> bool | None:
    """Judge two losses of one model.

    Args:
        first: loss where only the first token has a label, or None.
        last: loss where only the last token has one, which every loss reads; the control.

    Returns:
        Whether the loss shifts; None where there is no loss, or one that does not read labels.
    """
    if not _counts(last) or not isinstance(first, Tensor):
        return None
    return not _counts(first)


def measured_shift(model: nn.Module, inputs: Mapping[str, Any]) -> bool | None:
    """Run a document twice and say whether the loss shifts; see `shift_of_losses`.

    Args:
        model: in the mode in which it is to be judged.
        inputs: of one document of two tokens or more, `input_ids` `[1, S]`.

    Returns:
        None where the model takes no labels of its tokens or returns no loss.
    """
    ids = inputs["input_ids"]
    losses = []
    with torch.no_grad():
        for place in (0, -1):
            try:
                output = model(**{**inputs, "labels": one_label(ids, place)})
            except Exception:
                # Heads of other tasks take other labels, and models without a loss take none.
                return None
            losses.append(getattr(output, "loss", None))
    return shift_of_losses(*losses)


def _counts(loss: Any) -> bool:
    """Whether a loss has read a label: a mean over none is NaN, and some make it 0."""
    if not isinstance(loss, Tensor) or loss.numel() == 0:
        return False
    mean = loss.detach().float().mean()
    return bool(torch.isfinite(mean) & (mean != 0))
