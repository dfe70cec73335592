"""Labels that a collator writes for other losses than the mean per token: documents marked, tokens masked.

Legend: `B` rows, `S` tokens in a row.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ._compat import trainer_counts_shift_labels
from .columns import LABEL_MASKS
from .errors import ColumnError, ContractError, UnsupportedTransformersError

UNSHIFTED_LOSSES: Final = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
"""Losses of transformers that compare each token with its own label instead of the next token's."""

MaskTokens = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Masks tokens: from `input_ids` and `special_tokens_mask` to masked `input_ids` and `labels`, all `[B, S]`."""

IGNORE_INDEX = -100
"""The label that a loss leaves out."""

DOCUMENT_START = 2**31 - 1
"""The label of a document's first token where a batch is made for the mean per document.

It is larger than any token id, so that a loss that takes it for a target fails instead of learning it; a negative
number would be clipped to token 0 by some.
"""


def labels_from_masks(example: Mapping[str, Any]) -> dict[str, list[int]]:
    """Write labels that leave out the tokens which any mask of an example leaves out.

    A Trainer removes columns that the model's forward does not name, masks too, before a collator sees them. So write
    `dataset = dataset.map(labels_from_masks)` first; then labels say it, packed or not, in every trainer.

    Args:
        example: `input_ids`, and any of `completion_mask`, `assistant_masks` and `loss_mask`. Labels that are there
            already are masked further.

    Returns:
        `labels`.

    Example:
        >>> labels_from_masks({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]})
        {'labels': [-100, 6, 7]}
    """
    labels = example.get("labels", example["input_ids"])
    masks = [example[name] for name in LABEL_MASKS if name in example]
    return {
        "labels": [
            label if all(bits) else IGNORE_INDEX
            for label, *bits in zip(labels, *masks, strict=True)
        ]
    }


def mark_documents(labels: Tensor | None, document_map: Tensor) -> dict[str, Tensor]:
    """Write labels from which `per_document_loss` reads the documents, and a Trainer counts them.

    A document's first token is nobody's target, so its label is free to say that a document starts there. A Trainer
    counts the targets of an update in `shift_labels` where a batch has them; here they hold one entry for each
    document that has a target. A loss that takes either for the targets of tokens fails, because starts are no token
    ids and there are fewer documents than tokens.

    Args:
        labels: int64 `[B, S]`, -100 at the first token of each document.
        document_map: `[B, S]`, 1-based in each row, 0 = padding.

    Returns:
        `labels`, int64 `[B, S]`, and `shift_labels`, int64 `[B, most documents of a row]`.

    Raises:
        ContractError: labels that are not one per token.

    Example:
        >>> marked = mark_documents(torch.tensor([[-100, 7, -100, -100]]), torch.tensor([[1, 1, 2, 2]]))
        >>> marked["labels"].tolist(), marked["shift_labels"].tolist()
        ([[2147483647, 7, 2147483647, -100]], [[2147483647]])
    """
    if labels is None or labels.shape != document_map.shape:
        raise ContractError(
            f"labels are {None if labels is None else list(labels.shape)} for rows of shape "
            f"{list(document_map.shape)}: a mean per document of the losses of its tokens needs one label per token. "
            'Leave `loss_per="document"` out; for one label per document use `per_label_loss`.'
        )
    starts = torch.zeros_like(document_map, dtype=torch.bool)
    starts[:, 0] = document_map[:, 0] != 0
    starts[:, 1:] = (document_map[:, 1:] != document_map[:, :-1]) & (document_map[:, 1:] != 0)
    number = starts.flatten().cumsum(0) - 1
    trained = torch.zeros(int(starts.sum()), dtype=torch.bool)
    trained[number[(labels != IGNORE_INDEX).flatten()]] = True
    rows = starts.nonzero()[:, 0][trained]
    counts = torch.bincount(rows, minlength=len(labels))
    places = torch.arange(max(int(counts.max()), 1)).expand(len(labels), -1)
    counted = torch.where(places < counts[:, None], DOCUMENT_START, IGNORE_INDEX)
    return {"labels": labels.masked_fill(starts, DOCUMENT_START), "shift_labels": counted}


def mask_documents(
    mask_tokens: MaskTokens, batch: dict[str, Any], document_map: Tensor
) -> dict[str, Tensor]:
    """Mask the tokens of a packed batch for masked language modelling.

    Args:
        mask_tokens: from `input_ids` and `special_tokens_mask` to masked `input_ids` and `labels`.
        batch: `input_ids` `[B, S]`, and `special_tokens_mask` where the data has one, which is taken out.
        document_map: `[B, S]`, 0 = padding: never masked and no target.

    Returns:
        `input_ids` and `labels`, `[B, S]`.

    Raises:
        ColumnError: the data has `labels` already.
    """
    if "labels" in batch:
        raise ColumnError(
            "The documents bring `labels`, and `mask_tokens` makes labels of its own: one of them would be lost. "
            "Remove the column, or leave `mask_tokens` out."
        )
    tail = document_map == 0
    special = batch.pop("special_tokens_mask", None)
    special = special.bool() | tail if special is not None else None
    # It may change its argument.
    masked, labels = mask_tokens(batch["input_ids"].clone(), special)
    return {
        "input_ids": torch.where(tail, batch["input_ids"], masked),
        "labels": labels.masked_fill(tail, IGNORE_INDEX),
    }


def require_loss_options(
    loss_per: str,
    mask_tokens: MaskTokens | None,
    loss_type: str | None,
    *,
    accepted_keys: Collection[str] | None,
    separator_id: int,
) -> None:
    """Refuse options of a collator that a loss cannot honour.

    Args:
        loss_per: `token` or `document`.
        mask_tokens: masking for masked language modelling, or None.
        loss_type: the model's, as transformers names it.
        accepted_keys: what the model's forward takes; None: everything.
        separator_id: label of each document's first token.

    Raises:
        ContractError: options that do not fit each other or the model.
        UnsupportedTransformersError: a Trainer that would divide by the number of tokens.
    """
    if mask_tokens is not None and loss_type == "ForCausalLM":
        raise ContractError(
            "`mask_tokens` was given for a model whose loss predicts the next token, so every masked token would be "
            "compared with its neighbour's logits. Use a masked language model, such as AutoModelForMaskedLM builds."
        )
    if loss_per == "token":
        return
    if loss_per != "document":
        raise ContractError(f"loss_per={loss_per!r}; accepted: 'token' and 'document'.")
    if loss_type in UNSHIFTED_LOSSES or mask_tokens is not None or separator_id != IGNORE_INDEX:
        raise ContractError(
            f"loss_per='document' with loss type {loss_type!r}, separator_id={separator_id} and mask_tokens="
            f"{mask_tokens}: documents are marked on their first token, which is a target here. Accepted: models that "
            "predict the next token, and the default separator_id."
        )
    if accepted_keys is not None and "shift_labels" not in accepted_keys:
        raise ContractError(
            f"loss_per='document' needs `shift_labels` in the batch, by which the Trainer counts documents, and this "
            f"model's forward takes only {sorted(accepted_keys)}. Add `**kwargs` to it."
        )
    if not trainer_counts_shift_labels():
        raise UnsupportedTransformersError(
            "loss_per='document' needs transformers >= 5.12: older Trainers count tokens where documents must be "
            'counted, and the loss would be too small. Write: pip install "transformers>=5.12".'
        )
