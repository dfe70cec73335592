"""Losses of packed batches that weigh documents, labels of documents, and evaluations, the same in any packing.

A Trainer divides a sum over the targets of one update by their number: that is the mean per token, and packing does
not change it. What is here is for other means. Each function has the form of the Trainer's
`compute_loss_func(outputs, labels, num_items_in_batch)`.

Legend: `B` rows, `S` tokens in a row, `V` vocabulary, `N` documents, `K` labels of a classifier.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import ContractError
from .loss_labels import DOCUMENT_START, IGNORE_INDEX


def per_document_loss(
    outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Average over documents the mean loss of each document's targets: long documents do not count more.

    Write `Trainer(..., data_collator=DataCollatorForNeatPacking(model, loss_per="document"),
    compute_loss_func=per_document_loss)`. The collator's labels say where documents start and how many have a target,
    so the Trainer's `num_items_in_batch` is the number of documents of the update, over all its batches and
    processes. The result is that of training on the documents one by one, whatever shares a row. A
    document without a target has no mean and is not counted. TRL's SFTTrainer takes these labels for token ids in its
    own metrics, and fails.

    Args:
        outputs: of a causal language model: a mapping with `logits` `[B, S, V]`, or a tuple that begins with them.
        labels: of the collator, `[B, S]`.
        num_items_in_batch: documents of the update that have a target; None: those of this batch.

    Returns:
        The scalar loss; the sum over the batches of an update is the mean over its documents.

    Raises:
        ContractError: labels that do not say where documents start.
    """
    if labels is None or not bool((labels == DOCUMENT_START).any()):
        raise ContractError(
            "The labels of this batch do not say where its documents start, so a mean per document would be a mean per "
            'token or per row. Write `DataCollatorForNeatPacking(model, loss_per="document")`, and leave `labels` in '
            "the batch."
        )
    logits = logits_of(outputs)
    document = ((labels == DOCUMENT_START).flatten().cumsum(0) - 1).to(logits.device)
    losses, is_target = token_losses(logits, labels)
    # As many slots as tokens, so that the number of documents need not be copied from the device.
    targets = torch.zeros_like(losses).index_add(0, document, is_target.to(losses.dtype))
    loss = (losses / targets[document].clamp(min=1)).sum()
    count = (targets > 0).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def per_label_loss(
    outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Average a classifier's loss over the labels of an update, however many documents a batch holds.

    Classifiers of transformers average over each batch. Packs hold different numbers of documents, so with gradient
    accumulation or several processes those means weigh documents unequally. Write
    `Trainer(..., compute_loss_func=per_label_loss)`.

    Args:
        outputs: of a classifier: a mapping with `logits` `[N, K]`, or a tuple that begins with them.
        labels: one label, `[N]` or `[N, 1]`: squared error. Of several, integers `[N]`: cross-entropy; floats
            `[N, K]`: binary cross-entropy of several at once.
        num_items_in_batch: labels of the update; None: those of this batch.

    Returns:
        The scalar loss.

    Raises:
        ContractError: labels that do not fit the logits.
    """
    logits = logits_of(outputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if labels is None or labels.shape[:1] != logits.shape[:1] or logits.ndim != 2:
        found = None if labels is None else list(labels.shape)
        raise ContractError(
            f"The model answers with logits of shape {list(logits.shape)} and the batch has labels of shape {found}. "
            "One row of logits and one label for each document are needed: write "
            "`hf_neat_packing.pack_sequence_classifier(model)`, and give documents `labels` that are numbers."
        )
    labels = labels.to(logits.device)
    one = logits.shape[1] == 1
    if one or labels.is_floating_point():
        labels = labels.reshape(logits.shape).to(logits.dtype)
        losses = (
            (logits - labels).square()
            if one
            else F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        )
        count: Tensor | int = labels.numel()
    else:
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        count = (labels != IGNORE_INDEX).sum()
    count = count if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count)


# Tokens whose probabilities are held at once, beside the logits of all.
_AT_ONCE = 1024


class PackedEvaluation:
    """Evaluate per target: the same numbers packed, padded, and in batches of any size.

    `eval_loss` of a Trainer is the mean over batches of each batch's mean, so a batch with few targets counts as much
    as one with many, and another packing gives another number. These two functions carry sums instead:

    `Trainer(..., preprocess_logits_for_metrics=evaluation.sums, compute_metrics=evaluation.means)` logs
    `eval_token_loss`, `eval_token_accuracy` and `eval_token_entropy`, each over all targets of the set. Without any
    target they are 0. On several processes give every row one pack (`rows="packs"`, or one pack a batch):
    accelerate takes surplus rows away at the end.

    Args:
        shifts_labels: whether a token's logits predict the next token (causal models); a collator's
            attribute of this name says it.
    """

    def __init__(self, *, shifts_labels: bool = True) -> None:
        self.shifts_labels = shifts_labels

    def sums(self, logits: Any, labels: Tensor) -> Tensor:
        """Sum what is averaged over each row, so that no logits are kept.

        Args:
            logits: `[B, S, V]`, or a tuple that begins with them.
            labels: `[B, S]`; negative ones are no targets.

        Returns:
            float64 `[B, 4]`: targets, their losses, right predictions, entropies.
        """
        logits = logits_of(logits)
        targets = _targets(labels, self.shifts_labels).to(logits.device)
        is_target = (targets >= 0) & (targets != DOCUMENT_START)
        flat, wanted = logits.detach().flatten(0, 1), targets.where(is_target, 0)
        numbers = [
            _numbers(part, target)
            for part, target in zip(flat.split(_AT_ONCE), wanted.split(_AT_ONCE), strict=True)
        ]
        parts = torch.cat(numbers).double() * is_target[:, None]
        sums: Tensor = parts.unflatten(0, labels.shape).sum(1)
        return sums

    def means(self, prediction: Any) -> dict[str, float]:
        """Divide the sums of all rows.

        Args:
            prediction: an `EvalPrediction` whose predictions are what `sums` returned.
        """
        targets, *sums = np.asarray(prediction.predictions).reshape(-1, 4).sum(0).tolist()
        names = ("token_loss", "token_accuracy", "token_entropy")
        return {
            name: value / targets if targets else 0.0
            for name, value in zip(names, sums, strict=True)
        }


def _numbers(logits: Tensor, targets: Tensor) -> Tensor:
    """One, the loss, whether the target is the likeliest, and the entropy of each token, `[tokens, 4]`."""
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    losses = -log_probs.gather(1, targets[:, None]).squeeze(1)
    right = logits.argmax(-1) == targets
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return torch.stack([torch.ones_like(losses), losses, right.to(losses.dtype), entropy], -1)


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs: a mapping with `logits`, a tuple that begins with them, or they."""
    if isinstance(outputs, Tensor):
        return outputs
    logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return logits


def token_losses(logits: Tensor, labels: Tensor, *, shift: bool = True) -> tuple[Tensor, Tensor]:
    """Compute the loss of every target, 0 elsewhere, where the target itself stands.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]`; negative ones are no targets.
        shift: whether a token's logits predict the next token. Then the first token of a row is no target.

    Returns:
        Losses and whether there is a target, both `[B * S]`; with `shift` at the place of the predicting token.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = _targets(labels, shift).to(logits.device)
    is_target = (targets >= 0) & (targets != DOCUMENT_START)
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        targets.masked_fill(~is_target, IGNORE_INDEX),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses, is_target


def _targets(labels: Tensor, shift: bool) -> Tensor:
    """The target that each token's logits are compared with, `[B * S]`."""
    if not shift:
        return labels.flatten()
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
