"""Where tokens are in packed and in padded rows, and a model's outputs moved from the one to the other.

Legend: `B` padded rows, `W` their width, `R` packed rows, `S` tokens in one.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..errors import UnsupportedModelError


class Places(NamedTuple):
    """Where the tokens of a forward are, packed and padded, in one order.

    Attributes:
        packed: bool `[R, S]`.
        padded: bool `[B, W]`, with as many places.
    """

    packed: Tensor
    padded: Tensor

    def put_back(self, values: Tensor) -> Tensor:
        """Return the padded values `[B, W, ...]` of packed ones `[R, S, ...]`; 0 at padding."""
        padded = values.new_zeros((*self.padded.shape, *values.shape[2:]))
        return padded.index_put((self.padded,), values[self.packed])


def put_back(name: str, value: Any, places: Places) -> Any:
    """Put one entry of an output back; what is no tensor, or has a row already, stays as it is.

    Args:
        name: of the entry, for messages.
        value: a tensor, or a list or tuple of them.
        places: of the forward.

    Raises:
        UnsupportedModelError: a tensor that has neither a value for each token nor for each row.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(put_back(name, part, places) for part in value)
    if not isinstance(value, Tensor):
        return value
    rows, width = places.padded.shape
    if value.ndim == 3 and value.shape[:2] == places.packed.shape:
        return places.put_back(value)
    if value.ndim == 2 and value.shape[0] == places.packed.numel():
        # Router logits: the tokens of all rows in one line.
        return places.put_back(value.unflatten(0, places.packed.shape)).flatten(0, 1)
    if value.shape[:1] == (rows,) and value.ndim <= 2:
        return value
    raise UnsupportedModelError(
        f"The backbone's output {name!r} has shape {list(value.shape)} for {rows} rows of {width} tokens packed into "
        f"{list(places.packed.shape)}: neither a value for each token nor for each row, so it cannot be put back "
        "(attention weights are one example). Do not ask for it, or take the hooks off with `remove()`."
    )
