"""Media columns of documents: absent ones filled in, present ones joined, cut ones refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..columns import ColumnRule, resolve_column_rules
from ..errors import ColumnError

TOKEN_TYPES: Final = "mm_token_type_ids"
"""Column that says of each token whether it is text (0), image (1) or video (2)."""

# (value in TOKEN_TYPES, word, grids, pixels)
_KINDS: Final = (
    (1, "image", "image_grid_thw", "pixel_values"),
    (2, "video", "video_grid_thw", "pixel_values_videos"),
)


def has_entries(value: Any) -> bool:
    """Whether a media column of a document holds something."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def has_grids(document: Mapping[str, Any]) -> bool:
    """Whether a document has images or video that come with grids."""
    return any(has_entries(document.get(grids)) for _, _, grids, _ in _KINDS)


def fill_absent(
    rows: Sequence[Sequence[Mapping[str, Any]]],
    declared: Mapping[str, ColumnRule | str] | None = None,
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Give documents of text the media columns that others have: empty ones.

    Args:
        rows: the documents of each row, mappings from column to value.
        declared: column rules, as for `resolve_column_rules`.

    Returns:
        The rows; a document that lacks a media column has None there, and one that lacks
        `mm_token_type_ids`, and has no media, has 0 (text) for each token.
    """
    keys = [document.keys() for row in rows for document in row]
    if not keys or (TOKEN_TYPES not in keys[0] and keys.count(keys[0]) == len(keys)):
        return rows
    names = dict.fromkeys(name for row in rows for document in row for name in document)
    media = [name for name in names if _is_media(name, declared)]
    return [[_filled(document, media, TOKEN_TYPES in names) for document in row] for row in rows]


def _filled(
    document: Mapping[str, Any], media: Sequence[str], with_types: bool
) -> Mapping[str, Any]:
    added: dict[str, Any] = {name: None for name in media if name not in document}
    is_text = not any(has_entries(document.get(name)) for name in media)
    if with_types and document.get(TOKEN_TYPES) is None and is_text:
        added[TOKEN_TYPES] = np.zeros(len(document["input_ids"]), dtype=np.int64)
    return {**document, **added} if added else document


def _is_media(name: str, declared: Mapping[str, ColumnRule | str] | None) -> bool:
    try:
        return resolve_column_rules([name], declared)[name].kind == "media"
    except ColumnError:
        return False  # refused with all its context where the columns are described


def join_media(name: str, values: Sequence[Any]) -> Any:
    """Join the values of a media column in document order.

    Args:
        name: the column, for messages.
        values: one value per document: a tensor, an array or a list with one entry per patch,
            image or grid; None or an empty one for documents without.

    Returns:
        A tensor joined on dimension 0 where entries are numbers of one shape (whole numbers as
        int64, Python floats as float32), else a list of all entries; None where there are none.

    Raises:
        ColumnError: entries of two documents have different shapes.
    """
    parts = [value for value in values if has_entries(value)]
    if not parts:
        return None
    tensors = [_tensor(part) for part in parts]
    joined = [tensor for tensor in tensors if tensor is not None]
    if len(joined) < len(tensors):
        return [item for part in parts for item in part]
    shapes = {tuple(tensor.shape[1:]) for tensor in joined}
    if len(shapes) > 1:
        raise ColumnError(
            f"Column {name!r} has entries of shapes {sorted(shapes)} in different documents; joined "
            "in one row they would need one shape. Accepted: entries of one shape, joined on the "
            "first dimension. Process all images with the same settings."
        )
    return torch.cat(joined)


def _tensor(part: Any) -> Tensor | None:
    """Read numbers as a tensor; None for images, and for entries of several shapes."""
    if isinstance(part, Tensor):
        return part
    if not isinstance(part, np.ndarray) or part.dtype == object:
        try:
            part = np.asarray([item.numpy() if isinstance(item, Tensor) else item for item in part])
        except ValueError:
            return None
        if part.dtype == np.float64:
            part = part.astype(np.float32)
    if part.dtype.kind not in "biuf":
        return None
    if part.dtype.kind in "iu" and part.dtype != np.uint8:
        part = part.astype(np.int64)
    return torch.from_numpy(part if part.flags.writeable else part.copy())


@dataclass(frozen=True)
class Placeholders:
    """How many placeholder tokens the media of a document stand for, as its config says.

    Attributes:
        image_token_id: id of an image placeholder.
        video_token_id: id of a video placeholder.
        merge_size: patches on each side of the square that becomes one token, where media come
            with grids; None for other models.
        tokens_per_image: placeholders of every image, where all have as many.
    """

    image_token_id: int | None = None
    video_token_id: int | None = None
    merge_size: int | None = None
    tokens_per_image: int | None = None

    def check(self, document: Mapping[str, Any], number: int) -> None:
        """Raise if a document has other placeholders than its media stand for.

        Args:
            document: columns of one document.
            number: its index in the batch, for the message.

        Raises:
            ColumnError: naming the document, what it has and what its media stand for.
        """
        ids = np.asarray(document["input_ids"])
        if self.tokens_per_image is not None and self.image_token_id is not None:
            pixels = document.get("pixel_values")
            images = len(pixels) if pixels is not None else 0
            found = int((ids == self.image_token_id).sum())
            self._require(number, "image", found, images * self.tokens_per_image, "pixel_values")
        if self.merge_size is None:
            return
        total = 0
        for kind, word, grids, pixels_name in _KINDS:
            patches = _patches(document.get(grids))
            wanted = patches // self.merge_size**2
            total += wanted
            types = document.get(TOKEN_TYPES)
            if types is not None:
                self._require(number, word, int((np.asarray(types) == kind).sum()), wanted, grids)
            pixels = document.get(pixels_name)
            rows = len(pixels) if pixels is not None else 0
            if rows != patches:
                raise ColumnError(
                    f"Document {number} has {rows} patches in `{pixels_name}` while its `{grids}` "
                    f"stands for {patches}: every later document would get another one's pixels. "
                    "Accepted: the grids and pixels of one call of the processor, together."
                )
        if self.image_token_id is not None:
            known = (self.image_token_id, self.video_token_id)
            found = int(np.isin(ids, [i for i in known if i is not None]).sum())
            self._require(number, "image or video", found, total, "grids")

    def _require(self, number: int, word: str, found: int, wanted: int, source: str) -> None:
        if found != wanted:
            raise ColumnError(
                f"Document {number} has {found} {word} placeholder tokens while its media "
                f"(`{source}`) stand for {wanted}: it was cut inside an image, or its media belong "
                "to another document, and pixels would land on other tokens. Accepted: whole "
                "documents with all of their media. Tokenize without truncation and raise "
                "max_length, or leave such documents out (on_overlong='drop')."
            )

    def check_batch(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Raise if images and videos meet in a model that has one placeholder for both.

        Raises:
            ColumnError: the model would put image features on video tokens.
        """
        with_media = [
            any(has_entries(document.get(grids)) for document in documents)
            for _, _, grids, _ in _KINDS
        ]
        if not all(with_media) or self.image_token_id is None:
            return
        for number, document in enumerate(documents):
            types = document.get(TOKEN_TYPES)
            if types is None:
                continue
            ids = np.asarray(document["input_ids"])
            if bool((ids[np.asarray(types) == 2] == self.image_token_id).any()):
                raise ColumnError(
                    f"Document {number} marks video with the image placeholder "
                    f"{self.image_token_id}, as its model does, and the batch holds images too: the "
                    "model cannot tell which features go where and stops. Accepted: batches with "
                    "images, or with videos. Pack the two kinds of documents as two data sets."
                )


def _patches(grids: Any) -> int:
    """Count the patches of `[n, 3]` grids of (time, height, width)."""
    if not has_entries(grids):
        return 0
    return int(np.asarray(grids).prod(-1).sum())
