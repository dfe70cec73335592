"""What one model needs of documents with media, read once and carried without it.

Legend: `T` real tokens of the batch, `R` rows of positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import ColumnError, UnsupportedModelError
from ..wrappers import unwrap
from .media import Placeholders, has_grids
from .own_masks import OwnMasks, own_masks
from .positions import ModelPositions, PositionIndex, position_index


@dataclass(frozen=True)
class MediaLayout:
    """How documents with media are numbered and checked for one model.

    Attributes:
        positions: numbers a document on several axes; None for models with one position per token.
        placeholders: what the media of a document stand for.
        own_masks: makes the 4-D masks of a document where the model looks both ways inside images.
        refusal: why documents with grids cannot be numbered; None where they can.
    """

    positions: PositionIndex | None = None
    placeholders: Placeholders = field(default_factory=Placeholders)
    own_masks: OwnMasks | None = None
    refusal: str | None = (
        "no model was given, so nothing says how their tokens are numbered on several axes"
    )

    def number(
        self,
        documents: Sequence[Mapping[str, Any]],
        positions: NDArray[np.int64],
        *,
        text_only: bool = False,
    ) -> NDArray[np.int64]:
        """Check the media of documents and number their tokens.

        Args:
            documents: columns of each document, in order.
            positions: restarting positions, int64 `[T]`.
            text_only: whether no document has a media column.

        Returns:
            Positions as the model reads them: int64 `[T]`, or `[R, T]`.

        Raises:
            ColumnError: a document that was cut inside an image, or that cannot be numbered.
        """
        if not text_only:
            self._check(documents)
        if self.positions is None:
            return positions
        if text_only and isinstance(self.positions, ModelPositions):
            return np.tile(positions, (self.positions.rows, 1))
        parts = [self.positions(document) for document in documents]
        for number, (part, document) in enumerate(zip(parts, documents, strict=True)):
            expected = (len(parts[0]), len(document["input_ids"]))
            if part.ndim != 2 or tuple(part.shape) != expected:
                raise ColumnError(
                    f"position_index gave shape {list(part.shape)} for document {number}; accepted: int64 "
                    f"[rows, tokens] with the rows of the first document, here {list(expected)}."
                )
        return torch.cat(parts, dim=1).numpy()

    def _check(self, documents: Sequence[Mapping[str, Any]]) -> None:
        for number, document in enumerate(documents):
            self.placeholders.check(document, number)
            if self.refusal is not None and has_grids(document):
                raise ColumnError(
                    f"Document {number} carries images or video with grids, and {self.refusal}: plain positions "
                    "would give other logits than the document alone, without a word. Accepted: "
                    "DataCollatorForNeatPacking(model), or position_index= with a function from a document to "
                    "int64 positions [rows, tokens]."
                )
        self.placeholders.check_batch(documents)


def media_layout(
    model: nn.Module | None, position_index_of_user: PositionIndex | None = None
) -> MediaLayout:
    """Read from a built model what it needs of documents with media.

    Args:
        model: the built model in any wrappers, or None.
        position_index_of_user: replaces the model's own index function.
    """
    if model is None:
        refusal = None if position_index_of_user else MediaLayout.refusal
        return MediaLayout(positions=position_index_of_user, refusal=refusal)
    inner = unwrap(model)
    if not isinstance(inner, nn.Module):
        return MediaLayout(positions=position_index_of_user, refusal=None)
    positions, refusal = position_index_of_user, None
    has_index = False
    if positions is None:
        try:
            positions = position_index(inner)
            has_index = positions is not None
        except (ColumnError, UnsupportedModelError) as error:
            refusal = str(error)
    return MediaLayout(
        positions=positions,
        placeholders=_placeholders(getattr(inner, "config", None), has_grids=has_index),
        own_masks=own_masks(inner),
        refusal=refusal,
    )


def _placeholders(config: Any, *, has_grids: bool) -> Placeholders:
    vision = getattr(config, "vision_config", None)
    merge = getattr(vision, "spatial_merge_size", None) if has_grids else None
    return Placeholders(
        image_token_id=getattr(config, "image_token_id", None),
        video_token_id=getattr(config, "video_token_id", None),
        merge_size=merge if isinstance(merge, int) else None,
        tokens_per_image=getattr(config, "mm_tokens_per_image", None),
    )
