"""Finding the module in which a packed row parts from its documents alone.

Legend: `S` tokens in a row.
"""

from .conditions import under_key
from .probe import Probe
from .record import ModuleCall, first_parting, outputs_part


class Search:
    """Finds, one after the other, the modules in which a packed row parts from its documents alone.

    Attributes:
        skip: names of modules that are passed over, because nothing heals them.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe, self.sample = probe, probe.sample()
        self.length = self.sample.document_map.shape[1]
        self.skip: set[str] = set()
        self.alone = [probe.alone(ids)[0] for _, _, ids in self.sample.documents()]

    def packed(self) -> list[ModuleCall]:
        """Run the packed row and record it."""
        inputs = self.probe.packed_inputs(self.sample, every_key=False)
        return self.probe.recorded(inputs)[0]

    def first(self, packed: list[ModuleCall]) -> ModuleCall | None:
        """Find the first module that parts, for any document."""
        found = [
            call
            for (_, place, ids), alone in zip(self.sample.documents(), self.alone, strict=True)
            if (
                call := first_parting(
                    packed,
                    alone,
                    (place, slice(0, len(ids))),
                    (self.length, len(ids)),
                    tolerance=self.probe.tolerance,
                    skip=self.skip,
                )
            )
        ]
        order = {id(call): number for number, call in enumerate(packed)}
        return min(found, key=lambda call: order[id(call)]) if found else None

    def heals(self, call: ModuleCall) -> bool:
        """Whether the module now gives each document what it gives it alone."""
        try:
            now = _same_call(self.packed(), call)
        except Exception:
            return False
        if now is None:
            return False
        for (_, place, ids), alone in zip(self.sample.documents(), self.alone, strict=True):
            twin = _same_call(alone, call)
            spans, lengths = (place, slice(0, len(ids))), (self.length, len(ids))
            if twin is None or outputs_part(
                now, twin, spans, lengths, tolerance=self.probe.tolerance
            ):
                return False
        return True

    def depends_on_place_only(self, call: ModuleCall) -> bool:
        """Whether a module's output is the same for any tokens."""
        other = self.probe.exchanged(self.sample, keep=lambda number: False)
        calls, _ = self.probe.recorded(self.probe.packed_inputs(other, every_key=False))
        twin = _same_call(calls, call)
        whole, length = slice(0, self.length), self.length
        return twin is not None and not outputs_part(
            call, twin, (whole, whole), (length, length), tolerance=0.0
        )


class EagerSearch:
    """Finds the modules that compute a document alone otherwise than by the model's eager attention."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.inputs = probe.alone_inputs(probe.sample(((7,),)).rows[0][0])
        self.truth: list[ModuleCall] | None = None
        with under_key(probe.inner, "eager") as possible:
            if possible:
                self.truth = probe.recorded(self.inputs)[0]

    def first(self) -> ModuleCall | None:
        """Find the deepest first such module; None where there is none or the truth is not known."""
        if self.truth is None:
            return None
        whole = slice(0, 7)
        calls = self.probe.recorded(self.inputs)[0]
        return first_parting(
            calls,
            self.truth,
            (whole, whole),
            (7, 7),
            tolerance=self.probe.tolerance,
            skip=set(),
        )

    def heals(self, call: ModuleCall) -> bool:
        """Whether a module now computes what it computes by eager attention."""
        assert self.truth is not None
        try:
            now = _same_call(self.probe.recorded(self.inputs)[0], call)
        except Exception:
            return False
        twin = _same_call(self.truth, call)
        whole = slice(0, 7)
        return (
            now is not None
            and twin is not None
            and not outputs_part(now, twin, (whole, whole), (7, 7), tolerance=self.probe.tolerance)
        )


def _same_call(calls: list[ModuleCall], call: ModuleCall) -> ModuleCall | None:
    return next((c for c in calls if (c.name, c.number) == (call.name, call.number)), None)
