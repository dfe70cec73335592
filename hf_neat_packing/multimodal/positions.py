"""Positions on several axes (time, height, width), made by the model's own index function.

The function is a method, and a collator in a loader worker has no model. It only reads the config
and plain settings, so those and the class are all that is kept: they pickle, and the method runs on
a shell that has nothing else.

Legend: `L` tokens of a document, `A` axes, `R` rows: the axes, after a text row where a model reads one.
"""

import copy
import inspect
import types
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ColumnError, UnsupportedModelError
from .media import has_entries, has_grids

_METHOD = "get_rope_index"
_SCALARS = (bool, int, float, str, type(None))


class PositionIndex(Protocol):
    """Numbers the tokens of one document, alone, as the model reads positions."""

    def __call__(self, document: Mapping[str, Any]) -> Tensor:
        """Return int64 `[R, L]`; `R` is the same for every document."""
        ...


class _Shell:
    """Stands in for a module: its config, its plain settings, and the methods of its class."""

    def __init__(self, owner: type, config: Any, settings: Mapping[str, Any]) -> None:
        self.__dict__.update(settings, config=config, shell_owner=owner)

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__["shell_owner"]
        found = getattr(owner, name, None)
        if isinstance(found, types.FunctionType):
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            return found if is_static else types.MethodType(found, self)
        if found is None or isinstance(found, property):
            raise AttributeError(f"{owner.__name__}.{_METHOD} reads self.{name}")
        return found


class ModelPositions:
    """The index function of a model, carried without the model.

    Args:
        module: the module of the model that has `get_rope_index`.
        text_row: whether the model reads a row of plain positions before the axes.

    Raises:
        UnsupportedModelError: the function needs more than a config and plain settings.
    """

    def __init__(self, module: nn.Module, *, text_row: bool) -> None:
        self.owner = type(module)
        self.config = copy.deepcopy(module.config)
        self.settings = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, _SCALARS) and not name.startswith("_")
        }
        self.text_row = text_row
        ids = torch.zeros(1, 2, dtype=torch.int64)
        self.rows = text_row + len(self._run({"input_ids": ids[0], "mm_token_type_ids": ids[0]}))

    def __call__(self, document: Mapping[str, Any]) -> Tensor:
        """Number one document; text counts 0, 1, ... on every axis.

        Args:
            document: columns of one document, as a processor makes them.

        Returns:
            int64 `[R, L]`.

        Raises:
            ColumnError: a column that the function needs is not there, or it makes no position for each token.
        """
        length = len(document["input_ids"])
        count = torch.arange(length)
        if not has_grids(document):
            return count.expand(self.rows, length)
        axes = self._run(document)
        if axes.shape[1] != length:
            raise ColumnError(
                f"{self.owner.__name__}.{_METHOD} made {axes.shape[1]} positions for a document of {length} tokens: "
                "its grids and its placeholders do not belong together. Accepted: whole documents, as the "
                "processor made them."
            )
        return torch.cat([count[None], axes]) if self.text_row else axes

    def _run(self, document: Mapping[str, Any]) -> Tensor:
        shell = _Shell(self.owner, self.config, self.settings)
        method = getattr(self.owner, _METHOD)
        arguments = {}
        for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
            if name == "attention_mask":
                arguments[name] = torch.ones(1, len(document["input_ids"]), dtype=torch.int64)
            elif has_entries(document.get(name)):
                value = document[name]
                value = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
                per_token = name in ("input_ids", "mm_token_type_ids")
                arguments[name] = value.long()[None] if per_token else value
            elif (
                parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            ):
                raise ColumnError(
                    f"The documents carry images or video but no column {name!r}, which "
                    f"{self.owner.__name__} needs to number their tokens. The processor returns it beside "
                    "`input_ids`: keep it in the data set."
                )
        try:
            positions, _ = method(shell, **arguments)
        except AttributeError as error:
            raise UnsupportedModelError(
                f"The positions of {self.owner.__name__} need more than its config: {error}. Without the model in the "
                "loader they cannot be made. Write DataCollatorForNeatPacking(model, position_index=...) with a "
                "function from a document to int64 positions [rows, tokens]."
            ) from error
        return positions[:, 0].long()  # type: ignore[no-any-return]


def position_index(model: nn.Module) -> ModelPositions | None:
    """Carry the index function of a model away from it.

    Args:
        model: the unwrapped model.

    Returns:
        The function, or None for a model that has none.

    Raises:
        UnsupportedModelError: the function needs more than a config and plain settings.
    """
    for module in model.modules():
        if callable(getattr(type(module), _METHOD, None)) and hasattr(module, "config"):
            return ModelPositions(module, text_row=_reads_text_row(model))
    return None


def _reads_text_row(model: nn.Module) -> bool:
    """Whether some forward of the model takes a row of plain positions off before the axes.

    There is no declaration for it. Transformers' convention is `text_position_ids`, split off where
    positions have four rows.
    """
    codes = {
        getattr(inspect.unwrap(type(module).forward), "__code__", None)
        for module in model.modules()
    }
    return any(
        code is not None and "text_position_ids" in code.co_varnames and 4 in code.co_consts
        for code in codes
    )
