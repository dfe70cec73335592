"""Positions and `seq_idx` of a document map, and the map that restarting positions tell.

Legend: as in `documents`.
"""

import torch
from torch import Tensor

from .documents import binary_to_map, documents, host_map, runs_of
from .errors import BoundaryError


def position_ids_from_document_map(document_map: Tensor, *, start: int = 0) -> Tensor:
    """Number the tokens of each document from `start`; padding gets `start` counted from its own run.

    Args:
        document_map: `[B, S]`.
        start: position of a document's first token (RoBERTa-like models: `padding_idx + 1`).

    Returns:
        int64 `[B, S]` on the map's device. A document interrupted by padding goes on counting after it.

    Example:
        >>> position_ids_from_document_map(torch.tensor([[1, 1, 2, 2, 2, 0]]), start=2)
        tensor([[2, 3, 2, 3, 4, 2]])
    """
    host = host_map(binary_to_map(document_map))
    runs = runs_of(host)
    positions = torch.arange(host.numel()) - torch.repeat_interleave(runs.starts, runs.lengths)
    tokens, starts, _ = documents(host)
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    positions[tokens] = torch.arange(tokens.numel()) - torch.repeat_interleave(starts, lengths)
    return (positions.reshape(host.shape) + start).to(document_map.device)


def seq_idx_from_document_map(document_map: Tensor) -> Tensor:
    """Number the segments of each row from 0, padding runs included, as causal-conv1d and mamba read it.

    Returns:
        int32 `[B, S]`; two neighbours are equal exactly when they are in one segment of one row.

    Example:
        >>> seq_idx_from_document_map(torch.tensor([[1, 1, 2, 0]]))
        tensor([[0, 0, 1, 2]], dtype=torch.int32)
    """
    host = host_map(binary_to_map(document_map))
    change = torch.zeros_like(host)
    change[:, 1:] = host[:, 1:] != host[:, :-1]
    return change.cumsum(-1).to(torch.int32).to(document_map.device)


def document_map_from_position_ids(position_ids: Tensor, *, batch_size: int = 1) -> Tensor:
    """Guess a document map from restarting positions, the last resort where nothing better is given.

    One- and two-dimensional ids, and the text row of four-row multi-axis ids, start a document
    wherever a position does not go up. Three-row ids (temporal, height, width) repeat inside an
    image, so there a document starts only where every axis is at its own first value.

    Args:
        position_ids: `[S]`, `[B, S]`, `[3, B, S]` or `[4, B, S]`.
        batch_size: rows of the batch; 1-D ids are only unambiguous for one row.

    Returns:
        int64 `[B, S]`; no entry is 0, because positions do not tell padding from documents.

    Raises:
        BoundaryError: 1-D ids beside several rows, or another shape.

    Example:
        >>> document_map_from_position_ids(torch.tensor([[3, 4, 5, 0, 1]]))
        tensor([[1, 1, 1, 2, 2]])
    """
    ids = position_ids
    if ids.ndim == 1:
        if batch_size != 1:
            raise BoundaryError(
                f"`position_ids` of shape {list(ids.shape)} beside a batch of {batch_size} rows: one line of "
                "positions cannot say where each row's documents start. Give `position_ids` of shape [batch, sequence]."
            )
        ids = ids[None]
    if ids.ndim == 3 and ids.shape[0] == 4:
        ids = ids[0]
    if ids.ndim == 3 and ids.shape[0] == 3:
        first = ids.amin(dim=-1, keepdim=True)
        start = (ids == first).all(0)
        # The first value of every axis also recurs in a one-patch image; only a step down or a
        # repeat of a whole coordinate is a new document there.
        start[:, 1:] &= (ids[:, :, 1:] <= ids[:, :, :-1]).all(0)
    elif ids.ndim == 2:
        start = torch.ones_like(ids, dtype=torch.bool)
        start[:, 1:] = ids[:, 1:] <= ids[:, :-1]
    else:
        raise BoundaryError(
            f"`position_ids` must be [S], [B, S], [3, B, S] or [4, B, S], got {list(position_ids.shape)}."
        )
    start[:, 0] = True
    return start.to(torch.int64).cumsum(-1)
