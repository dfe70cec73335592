"""Padded batches packed into one row, and what the model says about the row put back where its tokens were.

Legend: `B` padded rows, `W` their width, `S` tokens in the packed row, `N` documents: rows with a token.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..collator import DataCollatorForNeatPacking
from ..columns import DEFAULT_COLUMN_RULES, ColumnRule
from ..errors import BoundaryError, ColumnError

# Any of these makes labels; without one, none are made.
_LABELS = ("labels", "shift_labels", "completion_mask", "loss_mask", "assistant_masks")


def pack_padded(
    batch: Mapping[str, Any], collator: DataCollatorForNeatPacking | None = None
) -> dict[str, Any]:
    """Lay the rows of a padded batch end to end, without their padding.

    Padding may be on the left, on the right or on both sides, as prompts and completions of reinforcement learning
    leave it. Positions count from each row's first real token. Costs one copy of the batch to the host.

    Args:
        batch: `input_ids` and `attention_mask` (0/1 or bool), both `[B, W]`, and further columns: per token `[B, W]`
            or one number a row `[B]`. Masks of trained tokens become labels; without any there are none.
        collator: of the model that will run the row; default: for `neat_varlen` and the flash keys. Its row length
            is left aside: there is one row, in the order of the batch.

    Returns:
        What the collator writes for documents, on the batch's device.

    Raises:
        BoundaryError: no 2-D mask, or no real token.
        ColumnError: a column that is neither per token nor per row, images, or positions that do not count
            from each row's first token.

    Example:
        >>> ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> packed = pack_padded({"input_ids": ids, "attention_mask": mask})
        >>> packed["input_ids"].tolist(), packed["position_ids"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 0, 1, 2]])
    """
    ids = batch["input_ids"]
    keep = _real_tokens(batch)
    rows = [index for index, row in enumerate(keep.cpu()) if row.any()]
    device = ids.device
    keep = keep.cpu()
    columns = {
        name: _column(name, value, keep)
        for name, value in batch.items()
        if name != "attention_mask"
    }
    documents = [{name: column[row] for name, column in columns.items()} for row in rows]
    collator = copy.copy(DataCollatorForNeatPacking() if collator is None else collator)
    collator.row_length, collator.rows = None, "flat"
    shapes: dict[str, ColumnRule | str] = {
        name: "token" if isinstance(column[rows[0]], Tensor) else "document"
        for name, column in columns.items()
        if name not in DEFAULT_COLUMN_RULES
    }
    collator.columns = shapes | collator.columns
    packed = collator(documents)
    if not any(name in batch for name in _LABELS):
        packed.pop("labels", None)
    return {name: _to(value, device) for name, value in packed.items()}


def unpack_to_padded(packed: Tensor, attention_mask: Tensor, *, fill: float = 0.0) -> Tensor:
    """Put the values of a packed row back into the padded rows that it came from.

    Args:
        packed: `[1, S, ...]`, one value a token; what follows the last document is left out. Gradients flow through.
        attention_mask: the padded batch's, `[B, W]`.
        fill: what padding gets.

    Returns:
        `[B, W, ...]`.

    Raises:
        BoundaryError: fewer values than real tokens, or more than one row.

    Example:
        >>> unpack_to_padded(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1], [1, 1]]), fill=-1)
        tensor([[-1,  5],
                [ 6,  7]])
    """
    keep = attention_mask.bool().to(packed.device)
    num_tokens = int(keep.sum())
    if packed.ndim < 2 or packed.shape[0] != 1 or packed.shape[1] < num_tokens:
        raise BoundaryError(
            f"A packed value of shape {list(packed.shape)} cannot be put back where {num_tokens} tokens of an attention"
            " mask were: one row `[1, S, ...]` with a value for each token is needed. Pass the mask of the very batch "
            "that `pack_padded` packed."
        )
    padded = packed.new_full((*keep.shape, *packed.shape[2:]), fill)
    return padded.index_put((keep,), packed[0, :num_tokens])


def _real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Where the real tokens are, bool `[B, W]`."""
    mask, ids = batch.get("attention_mask"), batch["input_ids"]
    if mask is None or ids.ndim != 2 or mask.shape != ids.shape:
        found = None if mask is None else list(mask.shape)
        raise BoundaryError(
            f"The padded batch has input_ids of shape {list(ids.shape)} and an attention_mask of shape {found}. Both "
            "must be [rows, width]: padding is what the mask says, because a padding token may also be text."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BoundaryError(
            f"The attention_mask of the padded batch holds values up to {mask.max().item()}; 0 and 1 are accepted. A "
            "mask with document numbers describes rows that are packed already: give them to the model as they are."
        )
    if not bool(mask.any()):
        raise BoundaryError("The padded batch has no real token: every entry of its mask is 0.")
    return mask.bool()  # type: ignore[no-any-return]


def _column(name: str, value: Any, keep: Tensor) -> list[Any]:
    """Cut a column into its rows: tensors of the real tokens, or one number each."""
    rule = DEFAULT_COLUMN_RULES.get(name)
    if isinstance(value, Tensor) and not (rule is not None and rule.kind == "media"):
        if value.shape == keep.shape:
            return [row[kept] for row, kept in zip(value.detach().cpu(), keep, strict=True)]
        if value.shape == keep.shape[:1]:
            return value.detach().cpu().tolist()
    found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ColumnError(
        f"Column {name!r} of the padded batch is {found}, where rows are {list(keep.shape)}. Accepted: text columns "
        "with a value for each token `[rows, width]`, or one number a row `[rows]`. Leave the column out of what is "
        "packed, or pad it to the width of `input_ids`."
    )


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value
