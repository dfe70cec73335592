"""The media of a packed batch, given back to the documents that they came with.

A collator joins the pixels and grids of all documents; placeholders among the tokens say how many belong to each.

Legend: `N` documents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BoundaryError
from ..multimodal import media_layout
from ..multimodal.media import TOKEN_TYPES


class _Kind(NamedTuple):
    """One kind of media: its value in the token types, and its columns."""

    type_id: int
    word: str
    pixels: str
    grids: str
    per_grid: tuple[str, ...]


_KINDS: Final = (
    _Kind(1, "image", "pixel_values", "image_grid_thw", ()),
    _Kind(2, "video", "pixel_values_videos", "video_grid_thw", ("second_per_grid_ts",)),
)

MEDIA_COLUMNS: Final = frozenset(
    name for kind in _KINDS for name in (kind.pixels, kind.grids, *kind.per_grid)
)
"""Columns of a batch that have entries for patches, images or grids, not for tokens."""


@dataclass(frozen=True)
class DocumentMedia:
    """Which entries of each media column belong to each document.

    Attributes:
        spans: column -> first and last entry of each document, in order; `N` pairs.
    """

    spans: Mapping[str, tuple[tuple[int, int], ...]]

    def of(self, batch: Mapping[str, Any], document: int) -> dict[str, Any]:
        """Cut the media of one document out of the batch; columns of which it has none are left out."""
        found = {}
        for name, spans in self.spans.items():
            start, stop = spans[document]
            if stop > start:
                found[name] = batch[name][start:stop]
        return found

    def changed(self, batch: Mapping[str, Any], document: int) -> dict[str, Any]:
        """Return the pixel columns with other pixels in one document."""
        found = {}
        for kind in _KINDS:
            if kind.pixels in self.spans:
                start, stop = self.spans[kind.pixels][document]
                pixels = batch[kind.pixels].clone()
                pixels[start:stop] = 1 - 2 * pixels[start:stop]
                found[kind.pixels] = pixels
        return found


def media_of_documents(
    batch: Mapping[str, Any], tokens: Sequence[Mapping[str, Tensor]], model: nn.Module
) -> DocumentMedia | None:
    """Share the media of a batch out to its documents.

    Args:
        batch: a packed batch, perhaps with media columns.
        tokens: `input_ids` `[L]` of each document, and `mm_token_type_ids` where the batch has them.
        model: its config says which ids are placeholders, and for how much.

    Returns:
        None where the batch has no media.

    Raises:
        BoundaryError: media that cannot be shared out, with the reason.
    """
    if not MEDIA_COLUMNS & batch.keys():
        return None
    known = media_layout(model).placeholders
    spans: dict[str, tuple[tuple[int, int], ...]] = {}
    for kind in _KINDS:
        if kind.pixels not in batch:
            continue
        placeholder = known.image_token_id if kind.word == "image" else known.video_token_id
        counts = [_placeholders(of_document, kind, placeholder) for of_document in tokens]
        if kind.grids in batch:
            if known.merge_size is None:
                raise _not_shared(kind, "the config does not say how many patches become one token")
            sizes = batch[kind.grids].prod(-1).tolist()
            tokens_of = [size // known.merge_size**2 for size in sizes]
            grids = _shared(kind, counts, tokens_of)
            spans |= dict.fromkeys((kind.grids, *kind.per_grid), grids)
            edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
            if edges[-1] != len(batch[kind.pixels]):
                raise _not_shared(
                    kind, f"grids stand for {edges[-1]} patches of {len(batch[kind.pixels])}"
                )
            spans[kind.pixels] = tuple((edges[first], edges[last]) for first, last in grids)
        else:
            images = len(batch[kind.pixels])
            each = known.tokens_per_image or sum(counts) // max(images, 1)
            spans[kind.pixels] = _shared(kind, counts, [each] * images)
    return DocumentMedia({name: span for name, span in spans.items() if name in batch})


def _placeholders(tokens: Mapping[str, Tensor], kind: _Kind, placeholder: int | None) -> int:
    types = tokens.get(TOKEN_TYPES)
    if types is not None:
        return int((types == kind.type_id).sum())
    if placeholder is None:
        raise _not_shared(kind, f"the config names no id of {kind.word} placeholders")
    return int((tokens["input_ids"] == placeholder).sum())


def _shared(
    kind: _Kind, counts: Sequence[int], tokens_of: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Take media for each document until its placeholders are filled."""
    spans, at = [], 0
    for document, count in enumerate(counts):
        first, filled = at, 0
        while filled < count and at < len(tokens_of):
            filled += tokens_of[at]
            at += 1
        if filled != count:
            raise _not_shared(
                kind, f"document {document + 1} has {count} placeholders and media for {filled}"
            )
        spans.append((first, at))
    if at != len(tokens_of):
        raise _not_shared(kind, f"{len(tokens_of) - at} belong to no document")
    return tuple(spans)


def _not_shared(kind: _Kind, reason: str) -> BoundaryError:
    return BoundaryError(
        f"The {kind.word}s of the batch (`{kind.pixels}`) cannot be shared out to its documents: {reason}. So no "
        "document can be run alone with its own. Accepted: batches that DataCollatorForNeatPacking makes of what a "
        "processor returns; or a batch of text."
    )
