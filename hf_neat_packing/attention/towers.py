"""Vision and audio towers: the boundaries of the text say nothing about their patches and frames."""

from typing import Any, Final

import torch

from ..errors import BoundaryError
from ..offsets import full_stream_cu_seqlens
from .boundaries import DOCUMENT_MAP_KWARG, VARLEN_KWARGS

# Parts of a composite config whose attention reads no text, by words in the part's name.
_TOWERS: Final = ("vision", "image", "video", "audio", "speech")


def without_text_boundaries(module: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keep the document map of the text out of the attention of a vision or audio tower.

    Composite models hand their kwargs on to their towers. Transformers keeps the varlen kwargs back, but
    not the map, and an image may have as many patches as the row has tokens: it would be cut like the text.

    Args:
        module: the attention module; the name of its config in the composite one decides.
        kwargs: what reached its attention.

    Returns:
        The kwargs, without the map in a tower.

    Raises:
        BoundaryError: the varlen kwargs of the text have reached a tower.
    """
    document_map = kwargs.get(DOCUMENT_MAP_KWARG)
    if document_map is None:
        return kwargs
    part = getattr(getattr(module, "config", None), "base_config_key", "")
    if not isinstance(part, str) or not any(word in part for word in _TOWERS):
        return kwargs
    offsets = kwargs.get(VARLEN_KWARGS[0])
    if offsets is not None:
        of_text = full_stream_cu_seqlens(document_map.cpu())[0]
        if torch.equal(offsets.cpu().to(of_text.dtype), of_text):
            raise BoundaryError(
                f"The offsets of the text's documents reached {type(module).__name__}, a part of the {part!r}: its "
                "patches would be cut where the text's documents are. The model hands its kwargs on to the tower. "
                "Give the tower another attention, "
                f"attn_implementation={{'': 'neat_varlen', '{part}': 'sdpa'}}, which reads no offsets."
            )
    return {name: value for name, value in kwargs.items() if name != DOCUMENT_MAP_KWARG}
