"""What every repair is: removable hooks on a module, for the forwards of one model."""

from typing import Any, Protocol

from torch import nn

from ..hooks.running import RowLayout, Scope, read_layout, running

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Removable(Protocol):
    """Something that comes off again."""

    def remove(self) -> None:
        """Take it off; a second call does nothing."""


class Repair:
    """One way of keeping documents apart in a module.

    Attributes:
        name: what it is called in reports.
        cost: what it costs, in words.
        for_whole_class: whether all modules of a class need it when one does.
    """

    name = ""
    cost = ""
    for_whole_class = True

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def attach(self, module: nn.Module) -> list[Removable]:
        """Put the hooks on a module and return their handles."""
        raise AssertionError(f"{type(self).__name__} does not say what it attaches")

    def layout(self, kwargs: dict[str, Any]) -> RowLayout | None:
        """Return the documents of the running forward, None where it is not packed."""
        frame = running(self.scope)
        return read_layout(kwargs, None) if frame is None else frame.layout
