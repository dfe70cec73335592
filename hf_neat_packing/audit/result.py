"""What an audit found: checks with numbers, and where and why it failed."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from ..errors import UnsupportedModelError

Verdict = Literal["exact", "wrong", "raises", "inconclusive"]

RUNS: Final = "packed batch runs"
"""Name of the check that fails where the model raises."""

LABELS: Final = "label count"
"""Name of the check that fails where labels are lost, or cross documents."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was compared.
        passed: None where the check does not apply to this model.
        detail: one sentence, with what was counted.
        measured: the largest error found, or None.
        bound: the largest error that rounding explains, or None.
        is_control: whether the check shows that the audit can fail.
    """

    name: str
    passed: bool | None
    detail: str
    measured: float | None = None
    bound: float | None = None
    is_control: bool = False


@dataclass(frozen=True)
class Finding:
    """Where documents meet, why, and what to do.

    Attributes:
        module: name in the model.
        class_name: of the module.
        layer_type: as the config names it, or an empty string.
        cause: short code of the cause.
        words: the cause in words.
        advice: what to do.
    """

    module: str
    class_name: str
    layer_type: str
    cause: str
    words: str
    advice: str

    def __str__(self) -> str:
        layer = f", in a {self.layer_type!r} layer" if self.layer_type else ""
        return f"{self.module} ({self.class_name}{layer}): {self.words}. {self.advice}"


@dataclass(frozen=True)
class AuditReport:
    """The result of one audit.

    Attributes:
        model: class of the model.
        model_type: of its config, or an empty string.
        attention: the resolved attention key.
        layout: how the batch says where documents begin.
        dtype: of the model.
        device: of the model.
        mode: `train` or `eval`, the mode it was audited in.
        rows: rows of the batch.
        lengths: tokens of each document.
        oracle: dtype of the truth.
        checks: in the order in which they ran.
        finding: where it failed; None where it did not.
        notes: what the reader should know and no check says.
        environment: versions and hardware.
    """

    model: str
    model_type: str
    attention: str
    layout: str
    dtype: str
    device: str
    mode: str
    rows: int
    lengths: tuple[int, ...]
    oracle: str
    checks: tuple[Check, ...]
    finding: Finding | None = None
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def verdict(self) -> Verdict:
        """`exact`, `wrong`, `raises`, or `inconclusive` where a control did not fail as it must."""
        if any(check.name == RUNS for check in self.failed):
            return "raises"
        if any(not check.is_control for check in self.failed):
            return "wrong"
        return "inconclusive" if self.failed else "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"verdict": self.verdict, **asdict(self)}

    def summary(self) -> str:
        """Say the result in a few lines."""
        lines = [
            f"{self.model} with {self.attention!r}: {self.verdict} ({len(self.lengths)} documents, {self.mode} mode)"
        ]
        lines += [f"  {check.name}: {check.detail}" for check in self.failed]
        if self.finding is not None:
            lines.append(f"  first difference: {self.finding}")
        return "\n".join(lines)

    def raise_for_failure(self) -> None:
        """Raise unless the verdict is `exact`.

        Raises:
            UnsupportedModelError: with the failed checks, where it fails, why, and what to do.
        """
        if self.verdict != "exact":
            raise UnsupportedModelError(self.summary())
