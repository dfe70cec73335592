"""The boundaries of the forward that is running, for hooks deep inside it that are handed no boundaries.

They are scoped to the call: pushed when a module is entered, popped when it is left, kept apart by thread, and
nested (a teacher's forward inside a student's sees its own). A recomputation of activations runs after the
forward has left; the function that it calls again takes the boundaries of its own forward with it.

Legend: `B` rows, `S` tokens in a row.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contract import DOCUMENT_MAP_KEY, METADATA_KEYS, VARLEN_KEYS
from ..errors import BoundaryError, UnsupportedModelError
from ..offsets import document_map_from_cu_seqlens, full_stream_cu_seqlens
from ..positions import document_map_from_position_ids

BOUNDARY_KEYS = (*VARLEN_KEYS, *METADATA_KEYS, DOCUMENT_MAP_KEY, "seq_idx")
"""Keyword arguments that say where documents begin."""

# Where transformers, and torch's checkpoint wrapper, keep the function that checkpoints a layer.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


class RowLayout:
    """Where the documents of a batch lie in its rows.

    Attributes:
        rows: `B`.
        row_length: `S`.
        lengths: tokens of each document in row order, runs of padding included; where `padded`,
            each row is one document of this length with padding behind it.
        padded: whether each row holds one document and padding that nobody reads.
        real: bool `[B, S]`, False at padding; None where nobody says.
    """

    def __init__(
        self, rows: int, row_length: int, lengths: tuple[int, ...], *, padded: bool = False
    ) -> None:
        self.rows, self.row_length, self.lengths, self.padded = rows, row_length, lengths, padded
        self.real: Tensor | None = None
        self.cached: dict[Any, Any] = {}

    @classmethod
    def from_map(cls, document_map: Tensor) -> "RowLayout":
        """Read a document map `[B, S]`; costs one device synchronisation."""
        offsets, _ = full_stream_cu_seqlens(document_map.cpu())
        rows, row_length = document_map.shape
        layout = cls(rows, row_length, tuple(offsets.diff().tolist()))
        layout.real = document_map != 0
        return layout

    @property
    def one_document_a_row(self) -> bool:
        """Whether nothing in a row has to be kept apart."""
        return len(self.lengths) == self.rows

    def starts(self) -> list[int]:
        """First token of each document in the flattened batch."""
        if self.padded:
            return [row * self.row_length for row in range(self.rows)]
        starts, at = [], 0
        for length in self.lengths:
            starts.append(at)
            at += length
        return starts

    def varlen_kwargs(self, device: torch.device) -> dict[str, Any]:
        """Write the layout as transformers' varlen kwargs, offsets on the device."""
        key = ("varlen", device)
        if key not in self.cached:
            lengths = [self.row_length] * self.rows if self.padded else list(self.lengths)
            offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            values = (offsets, offsets, max(lengths), max(lengths))
            self.cached[key] = dict(zip(VARLEN_KEYS, values, strict=True))
        return dict(self.cached[key])

    def offsets_in_document(self, device: torch.device) -> Tensor:
        """Count the tokens of each document from 0: int64 `[B, S]`."""
        key = ("offsets", device)
        if key not in self.cached:
            lengths = [self.row_length] * self.rows if self.padded else self.lengths
            offsets = torch.cat([torch.arange(length) for length in lengths])
            self.cached[key] = offsets.reshape(self.rows, self.row_length).to(device)
        return self.cached[key]  # type: ignore[no-any-return]

    def same_document(self, device: torch.device) -> Tensor:
        """Say which tokens of a row share a document: bool `[B, 1, S, S]`."""
        key = ("same", device)
        if key not in self.cached:
            lengths = [self.row_length] * self.rows if self.padded else self.lengths
            numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            numbers = numbers.reshape(self.rows, 1, self.row_length).to(device)
            self.cached[key] = numbers[..., :, None] == numbers[..., None, :]
        return self.cached[key]  # type: ignore[no-any-return]


class Scope:
    """Whoever the boundaries of a forward are for.

    Attributes:
        attached: whether its hooks are on.
    """

    attached = True


class Frame(NamedTuple):
    """One level of a running forward.

    Attributes:
        scope: whose hooks these boundaries are for.
        module: the module that was entered.
        layout: its documents, or None where the batch is not packed.
        stash: what the hook that entered it needs when it is left.
        regrouped: whether the tokens inside lie otherwise than in the batch.
    """

    scope: Scope
    module: nn.Module
    layout: RowLayout | None
    stash: Any = None
    regrouped: bool = False


_FRAMES: ContextVar[tuple[Frame, ...]] = ContextVar("packed_forward", default=())


def push(frame: Frame) -> None:
    """Enter a module."""
    _FRAMES.set((*_FRAMES.get(), frame))


def pop() -> Frame:
    """Leave the module that was entered last."""
    frames = _FRAMES.get()
    _FRAMES.set(frames[:-1])
    return frames[-1]


def top() -> Frame | None:
    """Return the module that was entered last, or None outside of every forward."""
    frames = _FRAMES.get()
    return frames[-1] if frames else None


def running(scope: Scope) -> Frame | None:
    """Return the innermost level of a forward that belongs to a scope, or None outside of one."""
    return next((frame for frame in reversed(_FRAMES.get()) if frame.scope is scope), None)


class _WithFrames:
    """A function that runs inside the forward in which it was made, whenever it is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.frames = function, _FRAMES.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(frame.layout is not None and not frame.scope.attached for frame in self.frames):
            raise UnsupportedModelError(
                "Activations of a packed forward are computed again for its backward, but the hooks that kept its "
                "documents apart have been removed since: the gradients would be those of mixed documents. Call "
                "`backward()` first and `remove()` after it (inside the `with` block)."
            )
        token = _FRAMES.set(self.frames)
        try:
            return self.function(*args, **kwargs)
        finally:
            _FRAMES.reset(token)


class CarryingCheckpoint:
    """A checkpoint function whose recomputation knows the boundaries of its forward.

    Attributes:
        checkpoint: the function that was there before.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint a function that takes its boundaries along."""
        return self.checkpoint(_WithFrames(function), *args, **kwargs)


def carry_through_checkpoints(model: nn.Module) -> None:
    """Let every checkpointed part of a model take its boundaries into the recomputation."""
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            function = vars(module).get(name)
            if function is not None and not isinstance(function, CarryingCheckpoint):
                setattr(module, name, CarryingCheckpoint(function))


def restore_checkpoints(model: nn.Module) -> None:
    """Put the checkpoint functions back that `carry_through_checkpoints` wrapped."""
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            function = vars(module).get(name)
            if isinstance(function, CarryingCheckpoint):
                setattr(module, name, function.checkpoint)


def read_layout(kwargs: Mapping[str, Any], shape: tuple[int, int] | None) -> RowLayout | None:
    """Read the documents of a call from its keyword arguments, best source first.

    Args:
        kwargs: document map, varlen kwargs, `seq_idx` or restarting `position_ids`. Positions count
            only where no 2-D mask and no cache says what they mean.
        shape: rows and tokens of the call, where its inputs show them.

    Returns:
        The layout, or None where the call is not packed.

    Raises:
        BoundaryError: a map or offsets of another shape than the tokens.
    """
    document_map = kwargs.get(DOCUMENT_MAP_KEY)
    if document_map is None and kwargs.get(VARLEN_KEYS[0]) is not None:
        if shape is None:
            return None
        offsets = kwargs[VARLEN_KEYS[0]]
        document_map = document_map_from_cu_seqlens(
            offsets, batch_size=shape[0], row_length=shape[1]
        )
    if document_map is None and kwargs.get("seq_idx") is not None:
        document_map = kwargs["seq_idx"] + 1
    if document_map is not None:
        if shape is not None and tuple(document_map.shape) != shape:
            raise BoundaryError(
                f"The boundaries describe {list(document_map.shape)} tokens, the call holds {list(shape)}: they belong "
                "to other tokens, and would cut documents in the wrong places. Split and shift the map with the tokens."
            )
        return RowLayout.from_map(document_map)
    return _from_positions(kwargs, shape)


def _from_positions(kwargs: Mapping[str, Any], shape: tuple[int, int] | None) -> RowLayout | None:
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
    if not isinstance(positions, Tensor) or shape is None or cached:
        return None
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # the text row; three rows alone do not tell an image from a start
    if positions.ndim != 2:
        return None
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        return None
    if positions.shape[-1] != shape[1] or positions.shape[-2] not in (1, shape[0]):
        return None
    layout = RowLayout.from_map(
        document_map_from_position_ids(positions).expand(shape).contiguous()
    )
    return None if layout.one_document_a_row else layout
