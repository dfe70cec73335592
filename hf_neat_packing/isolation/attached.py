"""Everything that `isolate` puts on a model, and how it comes off again."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..hooks.entry import ModelEntry
from ..hooks.routing import leave_padding_out_of_routing, routing_hooks
from ..wrappers import unwrap
from .base import Removable, Repair


@dataclass(frozen=True)
class Applied:
    """One repair on the modules of one class.

    Attributes:
        repair: what was done.
        module_class: name of the class.
        modules: names of the modules.
        cost: what it costs, in words.
    """

    repair: str
    module_class: str
    modules: tuple[str, ...]
    cost: str


class Attached:
    """The hooks of one model, and the declaration by which its batches are written.

    Attributes:
        entry: the hooks at the entry, the scope of all others.
        applied: the repairs that were kept, in order.
        routing: the hooks that leave padding out of a router's counts, or None where there is no router.
    """

    def __init__(self, model: nn.Module) -> None:
        self.inner = unwrap(model)
        self.entry = ModelEntry(model)
        self.applied: list[Applied] = []
        self._handles: dict[Applied, list[Removable]] = {}
        self._declared_before: tuple[Any] | None = None
        self.entry.attach()
        # After the entry, so that what the entry hands on is seen.
        self._had_routing = routing_hooks(model) is not None
        self.routing = leave_padding_out_of_routing(model, scope=self.entry)

    def declare_offsets(self) -> None:
        """Let batches be written with offsets: masks are made inside, where each layer's own is known."""
        self._declared_before = (vars(self.inner).get("packed_mask_type"),)
        self.inner.packed_mask_type = "flash_varlen"

    def put_on(self, repair: Repair, modules: list[tuple[str, nn.Module]]) -> list[Removable]:
        """Attach a repair to modules, for the time being."""
        return [handle for _, module in modules for handle in repair.attach(module)]

    def keep(
        self, repair: Repair, modules: list[tuple[str, nn.Module]], handles: list[Removable]
    ) -> None:
        """Keep a repair that healed."""
        names = tuple(name for name, _ in modules)
        classes = dict.fromkeys(type(module).__name__ for _, module in modules)
        part = Applied(repair.name, " and ".join(classes), names, repair.cost)
        self.applied.append(part)
        self._handles[part] = handles

    def has(self, name: str, repair: str) -> bool:
        """Whether a module carries a repair."""
        return any(name in part.modules and repair == part.repair for part in self.applied)

    def take_off(self, names: tuple[str, ...]) -> list[Applied]:
        """Take the repairs of some names off and return them."""
        gone = [part for part in self.applied if part.repair in names]
        self.applied = [part for part in self.applied if part.repair not in names]
        for part in gone:
            for handle in self._handles.pop(part):
                handle.remove()
        return gone

    def take_off_repairs(self) -> None:
        """Take all repairs off; the hooks at the entry stay."""
        self.take_off(tuple(part.repair for part in self.applied))

    def remove(self) -> None:
        """Take everything off and leave the model as it was."""
        self.take_off_repairs()
        self.entry.remove()
        if self.routing is not None and self._had_routing:
            self.routing.scope = None
        elif self.routing is not None:
            self.routing.remove()
        if self._declared_before is not None:
            del self.inner.packed_mask_type
            if self._declared_before[0] is not None:
                self.inner.packed_mask_type = self._declared_before[0]
            self._declared_before = None
