"""4-D masks of models that look both ways inside an image, made by the model for each document.

Such a model composes its masks from token types that the collator's own masks know nothing of. It
offers the composition as a static method (`create_masks_for_generate`); called for one document at a
time, an image at the end of one document and at the start of the next stay two images.

Legend: `B` rows, `S` tokens in a row, `L` tokens of a document.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import PackingCapabilities
from ..errors import UnsupportedModelError

_METHOD = "create_masks_for_generate"
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class OwnMasks:
    """The mask composition of a model, carried without the model.

    Args:
        model: an unwrapped model whose composition reads token types.
        column: the token column that it reads.
    """

    def __init__(self, model: nn.Module, column: str) -> None:
        self.owner = type(model)
        self.config = copy.deepcopy(model.config)
        self.column = column

    def overlay(
        self,
        masks: Any,
        tokens: Mapping[str, Tensor],
        lengths: tuple[tuple[int, ...], ...],
        capabilities: PackingCapabilities,
    ) -> Any:
        """Put each document's own mask on the diagonal of the masks of a batch.

        Args:
            masks: what `masks_for` made: `[B, 1, S, S]`, or a dict of them by layer type.
            tokens: token columns `[B, S]`.
            lengths: for each row, the tokens of its documents.
            capabilities: of the model.

        Returns:
            The masks; as they were where the batch has no token types.

        Raises:
            UnsupportedModelError: the masks are of a form that cannot hold the overlay.
        """
        if self.column not in tokens:
            return masks
        if capabilities.layout not in ("bool_4d", "additive_4d"):
            raise UnsupportedModelError(
                f"{self.owner.__name__} looks both ways inside images, which {capabilities.attention_key!r} masks do "
                "not say here: the images of a packed row would be read in one direction only. Load the model with "
                'attn_implementation="neat_varlen", "sdpa" or "eager".'
            )
        by_type = masks if isinstance(masks, dict) else {self._first_type(capabilities): masks}
        # Layer types of one pattern share a tensor, and their overlays may differ.
        by_type = {name: None if m is None else m.clone() for name, m in by_type.items()}
        for row, row_lengths in enumerate(lengths):
            start = 0
            for length in row_lengths:
                span = slice(start, start + length)
                own = self._of_document(tokens[self.column][row, span], capabilities.mask_dtype)
                for name, mask in by_type.items():
                    block = own.get(name) if isinstance(own, dict) else own
                    if mask is not None and block is not None:
                        mask[row, :, span, span] = block[0]
                start += length
        return by_type if isinstance(masks, dict) else next(iter(by_type.values()))

    def _of_document(self, types: Tensor, dtype: torch.dtype) -> Any:
        """Let the model compose the masks of one document: None means plain causal."""
        length = len(types)
        known = {
            "config": self.config,
            "inputs_embeds": torch.empty(1, length, 1, dtype=dtype),
            "position_ids": torch.arange(length)[None],
            self.column: types[None],
        }
        method = getattr(self.owner, _METHOD)
        wanted = inspect.signature(method).parameters
        required = {
            name: known.get(name)
            for name, parameter in wanted.items()
            if name in known or parameter.default is parameter.empty
        }
        required = {
            name: value
            for name, value in required.items()
            if wanted[name].kind is not inspect.Parameter.VAR_KEYWORD
        }
        return method(**required)

    def _first_type(self, capabilities: PackingCapabilities) -> str:
        return next(m.layer_type for m in capabilities.layer_masks if m.kind != "recurrent")


def own_masks(model: nn.Module) -> OwnMasks | None:
    """Carry the mask composition of a model away from it.

    Args:
        model: the unwrapped model.

    Returns:
        The composition, or None for a model whose masks do not depend on token types.
    """
    method = getattr(type(model), _METHOD, None)
    if not callable(method) or not hasattr(model, "config"):
        return None
    wanted = inspect.signature(method).parameters
    column = next((name for name in _TOKEN_TYPES if name in wanted), None)
    return None if column is None else OwnMasks(model, column)
