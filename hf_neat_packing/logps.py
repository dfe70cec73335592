"""Log-probabilities of packed documents: per token and per document, for preference and reinforcement learning.

Legend: `B` rows, `S` tokens in a row, `V` vocabulary, `N` documents, in the order in which they lie in the rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .contract import DOCUMENT_MAP_KEY
from .errors import ColumnError, ContractError
from .loss_labels import IGNORE_INDEX
from .losses import logits_of, token_losses

_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")


def preference_documents(features: Sequence[Mapping[str, Any]]) -> list[dict[str, list[int]]]:
    """Write pairs of answers as documents: all chosen ones, then all rejected ones, as TRL orders them.

    The prompt is in both documents and is no target in either, so `unpack_logps(...).chunk(2)` are the
    log-probabilities of chosen and rejected answers, pair by pair.

    Args:
        features: `prompt_ids`, `chosen_ids` and `rejected_ids`, the columns of TRL's tokenised preference data.

    Returns:
        Documents with `input_ids` and `completion_mask`.

    Raises:
        ColumnError: features without these columns.

    Example:
        >>> preference_documents([{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}])[1]
        {'input_ids': [1, 2, 4, 5], 'completion_mask': [0, 0, 1, 1]}
    """
    for index, feature in enumerate(features):
        if missing := [name for name in _PAIR if name not in feature]:
            raise ColumnError(
                f"Pair {index} has no {missing} (found: {sorted(feature)}). A pair of answers is {list(_PAIR)}, each a "
                "list of token ids. Tokenise the pairs first, as TRL's DPOTrainer does."
            )
    return [
        {
            "input_ids": [*pair["prompt_ids"], *pair[answer]],
            "completion_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair[answer]),
        }
        for answer in ("chosen_ids", "rejected_ids")
        for pair in features
    ]


def token_logps(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Compute the log-probability of every target given what comes before it in its document.

    Args:
        outputs: of a causal model for a packed batch: a mapping with `logits` `[B, S, V]`, a tuple that begins with
            them, or they.
        batch: the packed batch. Its labels say which tokens count; without labels all but the first of each document.

    Returns:
        `[B, S]`, at the place of the token itself; 0 where a token does not count.

    Raises:
        ContractError: a batch without a document map.
    """
    labels = _labels(batch)
    losses, _ = token_losses(logits_of(outputs), labels)
    predicting = -losses.view_as(labels)
    return torch.nn.functional.pad(predicting[:, :-1], (1, 0))


def unpack_logps(outputs: Any, batch: Mapping[str, Any], *, average: bool = False) -> Tensor:
    """Sum the log-probabilities of the targets of each document.

    Args:
        outputs: of a causal model for a packed batch, as for `token_logps`.
        batch: the packed batch.
        average: divide by the number of targets; a document without one gets 0.

    Returns:
        `[N]`, documents in order.

    Raises:
        ContractError: a batch without a document map.
    """
    logps = token_logps(outputs, batch)
    document_map = batch[DOCUMENT_MAP_KEY].to(logps.device)
    before = document_map.amax(1).cumsum(0) - document_map.amax(1)
    number = (document_map + before[:, None]).flatten()
    real = (document_map != 0).flatten()
    num_documents = int(document_map.amax(1).sum())
    sums = logps.new_zeros(num_documents + 1)
    slot = number.where(real, 0)
    totals = sums.index_add(0, slot, logps.flatten())[1:]
    if not average:
        return totals
    labels = _labels(batch).to(logps.device)
    counts = sums.index_add(0, slot, (labels != IGNORE_INDEX).flatten().to(logps.dtype))[1:]
    return totals / counts.clamp(min=1)


def _labels(batch: Mapping[str, Any]) -> Tensor:
    """The labels of a packed batch, or its tokens; -100 at the first token of each document."""
    document_map = batch.get(DOCUMENT_MAP_KEY)
    if document_map is None:
        raise ContractError(
            f"The batch has no `{DOCUMENT_MAP_KEY}` (found: {sorted(batch)}), so nothing says which document a token "
            "belongs to. Collate with `DataCollatorForNeatPacking(model)` or `pack_padded`, and pass the whole batch."
        )
    labels: Tensor = batch.get("labels", batch["input_ids"])
    first = torch.ones_like(document_map, dtype=torch.bool)
    first[:, 1:] = document_map[:, 1:] != document_map[:, :-1]
    return labels.masked_fill(first | (document_map == 0), IGNORE_INDEX)
