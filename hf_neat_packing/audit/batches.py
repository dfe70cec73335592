"""The batches of an audit: a packed batch, each document alone, one document changed, no boundaries.

Legend: `B` rows, `S` tokens in a row, `N` documents of the batch, `L` tokens of one document.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..contract import DOCUMENT_MAP_KEY, METADATA_KEYS, VARLEN_KEYS
from ..errors import BoundaryError
from ..loss_labels import IGNORE_INDEX
from ..multimodal.media import TOKEN_TYPES
from ..offsets import document_map_from_cu_seqlens
from ..positions import document_map_from_position_ids
from ..wrappers import unwrap
from .media import MEDIA_COLUMNS, DocumentMedia, media_of_documents

LENGTHS: Final = (7, 1, 12, 5, 11)
"""Tokens of the audit's own documents: a document of one token, none a multiple of a window of 4 but one."""

# What says where documents lie; a document alone is given none of it.
_BOUNDARY_KEYS = frozenset(
    {*VARLEN_KEYS, *METADATA_KEYS, DOCUMENT_MAP_KEY, "attention_mask", "position_ids", "seq_idx"}
)

# Options of a forward that ride in a batch, such as `use_cache=False`.
_SWITCHES = (bool, int, float, str, type(None))

_MAX_IDS = 4096
_FALLBACK_IDS = 128


@dataclass(frozen=True)
class Span:
    """Where one document lies: row and token slice."""

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens of the document."""
        return self.stop - self.start

    def of(self, values: Tensor) -> Tensor:
        """Cut the document out of `[B, S, ...]`: `[L, ...]`."""
        return values[self.row, self.start : self.stop]


@dataclass(frozen=True)
class PackedInputs:
    """A packed batch whose documents are known.

    Attributes:
        batch: what the model is called with.
        document_map: int64 `[B, S]`, 0 = padding.
        spans: the documents, in row order.
        protected: token ids that stand for something else (images, ...) and are never changed.
        shifts_labels: whether the labels were written for a loss that shifts; None where nobody says.
        media: which pixels and grids belong to which document; None without any.
    """

    batch: Mapping[str, Any]
    document_map: Tensor
    spans: tuple[Span, ...]
    protected: frozenset[int]
    shifts_labels: bool | None = None
    media: DocumentMedia | None = None

    @property
    def input_ids(self) -> Tensor:
        """Token ids `[B, S]`."""
        ids: Tensor = self.batch["input_ids"]
        return ids

    @property
    def labels(self) -> Tensor:
        """Labels `[B, S]`: those of the batch, or the token ids; without each document's first if the loss shifts."""
        labels: Tensor | None = self.batch.get("labels")
        if labels is not None:
            return labels
        labels = self.input_ids.masked_fill(self.document_map == 0, IGNORE_INDEX)
        if self.shifts_labels is not False:
            for span in self.spans:
                labels[span.row, span.start] = IGNORE_INDEX
        return labels

    def alone(self, document: int) -> dict[str, Any]:
        """Return the inputs of one document by itself, `[1, L]` and its media, without anything about boundaries."""
        span = self.spans[document]
        tokens = {
            name: span.of(value)[None] if isinstance(value, Tensor) else value
            for name, value in self.batch.items()
            if name not in (*_BOUNDARY_KEYS, *MEDIA_COLUMNS, "labels")
        }
        return tokens if self.media is None else tokens | self.media.of(self.batch, document)

    def tokens_of(self, document: int) -> Tensor:
        """Return where a document lies: bool `[B, S]`."""
        span = self.spans[document]
        where = torch.zeros_like(self.document_map, dtype=torch.bool)
        where[span.row, span.start : span.stop] = True
        return where

    def others(self, document: int) -> Tensor:
        """Return where the other documents lie, padding left out: bool `[B, S]`."""
        return (self.document_map != 0) & ~self.tokens_of(document)

    def changed(self, document: int) -> dict[str, Any]:
        """Return the batch with another id in every token of a document, but for protected ones, and other pixels."""
        span = self.spans[document]
        ids = self.input_ids.clone()
        known = torch.unique(ids)
        if self.protected:
            special = torch.tensor(sorted(self.protected), device=ids.device)
            known = known[~torch.isin(known, special)]
        old = span.of(ids)
        # Rolled by half: the new ids are known to the model and far from the old ones.
        place = torch.searchsorted(known, old).clamp(max=max(len(known) - 1, 0))
        rolled = known[(place + max(len(known) // 2, 1)) % len(known)] if len(known) > 1 else old
        same = rolled == old
        rolled = torch.where(same & (old > 0), old - 1, torch.where(same, old + 1, rolled))
        keep = ~torch.isin(old, known)
        ids[span.row, span.start : span.stop] = torch.where(keep, old, rolled)
        media = {} if self.media is None else self.media.changed(self.batch, document)
        return {**self.batch, "input_ids": ids, **media}

    def without_boundaries(self, *, running_positions: bool = True) -> dict[str, Any]:
        """Return the control: the same tokens with nothing that keeps documents apart.

        Args:
            running_positions: number positions through the row; otherwise they stay and an all-ones
                mask switches transformers' own detection off, for rows beyond a table of positions.
        """
        bare = {k: v for k, v in self.batch.items() if k not in _BOUNDARY_KEYS}
        positions = self.batch.get("position_ids")
        if not isinstance(positions, Tensor):
            return bare
        if not running_positions:
            return {
                **bare,
                "position_ids": positions,
                "attention_mask": torch.ones_like(self.input_ids),
            }
        start = positions.flatten()[0]
        running = torch.arange(positions.shape[-1], device=positions.device) + start
        return {**bare, "position_ids": running.expand_as(positions).contiguous()}


def read_batch(
    batch: Mapping[str, Any], model: nn.Module, *, shifts_labels: bool | None = None
) -> PackedInputs:
    """Find the documents of a packed batch, on the model's device.

    Args:
        batch: `input_ids` `[B, S]`, boundaries in any form, further columns `[B, S]`.
        model: names the token ids that are placeholders.
        shifts_labels: whether its labels were written for a loss that shifts; None where nobody says.

    Raises:
        BoundaryError: no boundaries, fewer than two documents, or columns that cannot be cut by document.
    """
    device = next(model.parameters()).device
    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise BoundaryError(
            "The batch of an audit needs `input_ids` [rows, tokens]: isolation is measured by changing the tokens of "
            f"one document. Found: {sorted(batch)}."
        )
    for name, value in batch.items():
        by_token = isinstance(value, Tensor) and value.shape[:2] == ids.shape
        if name in _BOUNDARY_KEYS or by_token or isinstance(value, _SWITCHES):
            continue
        if name in MEDIA_COLUMNS:
            continue
        raise BoundaryError(
            f"Column {name!r} is not [rows, tokens], so the audit cannot give each document its part of it. Audit a "
            "batch of token columns, images and video; leave this column out."
        )
    document_map = _document_map(batch, ids)
    spans = list(_spans(document_map))
    if len(spans) < 2:
        raise BoundaryError(
            f"The batch holds {len(spans)} document: with one there is nothing to keep apart, and every model would "
            "pass. Give a batch of two documents or more."
        )
    names: list[str] = [name for name in ("input_ids", TOKEN_TYPES) if name in batch]
    tokens = [{name: span.of(batch[name]) for name in names} for span in spans]
    media = media_of_documents(batch, tokens, model)
    return PackedInputs(batch, document_map, tuple(spans), special_ids(model), shifts_labels, media)


def _spans(document_map: Tensor) -> Iterator[Span]:
    for row, numbers in enumerate(document_map.cpu()):
        start = 0
        ids, counts = torch.unique_consecutive(numbers, return_counts=True)
        for document, length in zip(ids.tolist(), counts.tolist(), strict=True):
            if document:
                yield Span(row, start, start + length)
            start += length


def _document_map(batch: Mapping[str, Any], ids: Tensor) -> Tensor:
    if isinstance(found := batch.get(DOCUMENT_MAP_KEY), Tensor):
        return found.long()
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask > 1).any()):
        return mask.long()
    rows, length = ids.shape
    if (offsets := batch.get(VARLEN_KEYS[0])) is not None:
        return document_map_from_cu_seqlens(offsets, batch_size=rows, row_length=length)
    if (positions := batch.get("position_ids")) is not None:
        return document_map_from_position_ids(positions, batch_size=rows)
    raise BoundaryError(
        f"The batch says nowhere where documents begin (found: {sorted(batch)}). Pass what "
        f"DataCollatorForNeatPacking makes, or add `{DOCUMENT_MAP_KEY}` [rows, tokens]."
    )


def special_ids(model: nn.Module) -> frozenset[int]:
    """Collect the token ids that a config names: padding, image placeholders and the like."""
    found: set[int] = set()
    for config in _configs(getattr(unwrap(model), "config", None)):
        for name, value in config.items():
            if str(name).endswith(("token_id", "token_index")):
                values = value if isinstance(value, (list, tuple)) else [value]
                found.update(v for v in values if isinstance(v, int) and v >= 0)
    return frozenset(found)


def _configs(config: Any) -> Iterator[Mapping[Any, Any]]:
    if config is None:
        return
    pending = [config.to_dict()]
    while pending:
        values = pending.pop()
        yield values
        pending += [v for v in values.values() if isinstance(v, dict)]


def random_documents(
    model: nn.Module, lengths: Sequence[int] = LENGTHS, *, seed: int = 0
) -> list[dict[str, list[int]]]:
    """Draw documents of random token ids, no id in two documents, none that the config names.

    Args:
        model: its table of input embeddings says which ids there are.
        lengths: tokens of each document.
        seed: of the draw.

    Raises:
        BoundaryError: fewer free ids than documents.
    """
    inner = unwrap(model)
    table = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    weight = getattr(table, "weight", None)
    named = getattr(getattr(inner, "config", None), "vocab_size", None)
    # Tables may hold more than the tokens that labels can name.
    sizes = [weight.shape[0]] if isinstance(weight, Tensor) else [_FALLBACK_IDS]
    size = min([*sizes, named] if isinstance(named, int) else sizes)
    # The first ids are special by custom, also where no config says so.
    first = 5 if size > 5 + 2 * len(lengths) else 0
    special = special_ids(model)
    free = torch.tensor([i for i in range(first, min(size, _MAX_IDS)) if i not in special])
    if len(free) < 2 * len(lengths):
        raise BoundaryError(
            f"{len(free)} token ids are free, too few for {len(lengths)} documents that share none. "
            "Pass a batch of your own."
        )
    generator = torch.Generator().manual_seed(seed)
    shuffled = free[torch.randperm(len(free), generator=generator)]
    pools = shuffled.tensor_split(len(lengths))
    return [
        {"input_ids": pool[torch.randint(len(pool), (n,), generator=generator)].tolist()}
        for pool, n in zip(pools, lengths, strict=True)
    ]
