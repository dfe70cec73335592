"""What `isolate` did to a model, and how it comes off again."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ..contract import PackingCapabilities
from ..wrappers import entry_module, unwrap
from .attached import Applied, Attached
from .samples import Verdict

_REGISTRY = "_neat_packing_isolation"


def isolation_of(model: nn.Module) -> "IsolationReport | None":
    """Return the report of the hooks that `isolate` put on a model, or None.

    Args:
        model: the model, in any number of wrappers.
    """
    return next(
        (
            vars(module)[_REGISTRY]
            for module in (model, entry_module(model), unwrap(model))
            if _REGISTRY in vars(module)
        ),
        None,
    )


@dataclass
class IsolationReport:
    """What `isolate` found, did and proved; `remove()` it, or use it as a context manager.

    Hooks must outlive the last backward, because recomputed activations need them too.

    Attributes:
        model_class: name of the model's class.
        attention_key: the attention that it runs.
        before: the packed forward without repairs, against each document alone.
        after: the same with them.
        applied: the repairs, in the order in which they were found.
        unpacked: whether the model runs on one document per padded row.
        capabilities: the contract by which its batches are written.
        shifts_labels: whether the model's loss compares a token with the next one's label; None where it takes none.
        notes: what is coupled across documents by design, and other things worth knowing.
    """

    model_class: str
    attention_key: str | None
    before: Verdict
    after: Verdict
    applied: tuple[Applied, ...]
    unpacked: bool
    capabilities: PackingCapabilities
    shifts_labels: bool | None = None
    notes: tuple[str, ...] = ()
    _attached: Attached | None = field(default=None, repr=False)

    def remove(self) -> None:
        """Take everything off and leave the model as it was; a second call does nothing."""
        if self._attached is not None:
            if vars(self._attached.entry.root).get(_REGISTRY) is self:
                del self._attached.entry.root.__dict__[_REGISTRY]
            self._attached.remove()

    def register(self) -> None:
        """Let `isolation_of` find this report on its model."""
        if self._attached is not None:
            self._attached.entry.root.__dict__[_REGISTRY] = self

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: everything but the hooks."""
        return {
            "model_class": self.model_class,
            "attention_key": self.attention_key,
            "before": str(self.before),
            "after": str(self.after),
            "applied": [asdict(part) for part in self.applied],
            "unpacked": self.unpacked,
            "shifts_labels": self.shifts_labels,
            "notes": list(self.notes),
        }

    def __enter__(self) -> "IsolationReport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __str__(self) -> str:
        lines = [f"{self.model_class} under {self.attention_key!r}"]
        if not self.applied and not self.unpacked:
            lines.append("  keeps documents apart as it is; its only hook is at its entry")
        for part in self.applied:
            what = f"{part.module_class} ({len(part.modules)}): {part.repair}"
            lines.append(f"  {what}; costs {part.cost}")
        lines.append(f"  before: {self.before}")
        lines.append(f"  after: {self.after}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
