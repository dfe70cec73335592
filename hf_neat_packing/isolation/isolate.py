"""`isolate(model)`: find where documents of a row reach each other, keep them apart with hooks, prove it.

Nobody lists classes: small forwards find the module, repairs are tried on it from the cheapest on, and what does not
heal it is taken off again. The last resort is the whole model on one document per padded row.
"""

from collections.abc import Callable, Sequence

from torch import nn

from ..capabilities import get_model_attn_implementation
from ..errors import UnsupportedModelError
from ..hooks.running import BOUNDARY_KEYS, Scope
from ..label_shift import declared_shift, measured_shift
from ..wrappers import unwrap
from .attached import Applied, Attached
from .balance import moved_by_padding
from .base import Repair
from .conditions import undisturbed
from .long_range import RotaryTablesPerDocument, TemperatureOfLongRows
from .mask_repairs import MarkOtherDocuments, MaskOtherDocuments, OwnAttention, takes_lazy_mask
from .notes import BALANCE, BALANCE_NOT_ASKED_FOR, LAST_RESORT, UNSHIFTED, batch_norm_notes
from .probe import ONE_ROW, TWO_ROWS, ForwardRaised, Probe, contract_of
from .record import ModuleCall
from .repairs import RestartPositions, candidates
from .report import IsolationReport, isolation_of
from .samples import Verdict
from .search import EagerSearch, Search

_MOST_SEARCHES = 400


def isolate(model: nn.Module, *, seed: int = 0) -> IsolationReport:
    """Keep the documents of packed rows apart in a model, by measurement, with removable hooks.

    Small forwards compare a packed row with each of its documents alone. Where they part, the deepest module that
    parts first gets the cheapest hook that heals it: boundaries handed to attention, positions restarted, a mask of
    other documents, or the layer run once per document. If nothing does, the whole model runs on one document per
    padded row. Then everything is checked again, in both modes, with several rows and every key of a batch.

    Args:
        model: the built model, in any number of wrappers; modes, buffers and random state stay as they are.
        seed: of the token ids that are tried.

    Returns:
        The report; it holds the hooks. A model that carries them already keeps them.

    Raises:
        ContractError: an attention key whose form of boundaries is not known.
        UnsupportedModelError: documents reach each other and no hook keeps them apart. The model is then as it was.

    Example:
        >>> with isolate(model) as report:  # doctest: +SKIP
        ...     loss = model(**collator(documents)).loss
        ...     loss.backward()
    """
    if (known := isolation_of(model)) is not None:
        if known.attention_key == get_model_attn_implementation(model):
            return known
        known.remove()
    attached = Attached(model)
    try:
        with undisturbed(unwrap(model)):
            report = _Isolation(model, attached, seed).run()
        report.register()
        return report
    except ForwardRaised as raised:
        attached.remove()
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} raises {type(raised.cause).__name__} on a few tokens of text alone: "
            f"{raised.cause}. So nothing shows whether packed rows keep their documents apart. Accepted: models that "
            "run on `input_ids`."
        ) from raised.cause
    except BaseException:
        attached.remove()
        raise


class _Isolation:
    """One run of `isolate`."""

    def __init__(self, model: nn.Module, attached: Attached, seed: int) -> None:
        self.model, self.attached, self.inner, self.seed = model, attached, attached.inner, seed
        self.notes = list(batch_norm_notes(self.inner))
        try:
            self.probe = Probe(model, contract_of(model), seed=seed)
        except UnsupportedModelError as refusal:
            if getattr(getattr(self.inner, "config", None), "is_encoder_decoder", False):
                raise
            self._write_offsets(str(refusal))

    def run(self) -> IsolationReport:
        """Measure, repair, measure; a contract whose masks do not serve is exchanged for one with offsets."""
        self._repair_long_range()
        before = self._check()
        after = before
        if isinstance(before.raised, TypeError):
            # Perhaps it hands every keyword on to a layer that does not know ours; hooks need none inside.
            self.attached.entry.strip.update(BOUNDARY_KEYS)
            after = self._check()
        unlike = self._repair_attention()
        if unlike or not self.probe.holds(after):
            after = self._repaired()
        if (
            not self.probe.holds(after)
            and self.probe.capabilities.packed_mask_type != "flash_varlen"
        ):
            self._start_again()
            self._write_offsets(f"with the masks of its contract it {after}")
            after = self._repaired()
        if not self.probe.holds(after):
            after = self._unpacked(after)
        self._judge_balance_loss()
        return IsolationReport(
            model_class=type(self.inner).__name__,
            attention_key=self.probe.capabilities.attention_key,
            before=before,
            after=after,
            applied=tuple(self.attached.applied),
            unpacked=self.attached.entry.unpack is not None,
            capabilities=self.probe.capabilities,
            shifts_labels=self._label_shift(),
            notes=tuple(self.notes),
            _attached=self.attached,
        )

    def _judge_balance_loss(self) -> None:
        """Say what the balance loss of a router holds; refuse where it is trained and counts padding."""
        moved = moved_by_padding(self.probe)
        if moved is not None and moved > self.probe.tolerance:
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} asks for router logits, and a padding tail moves its balance loss by "
                f"{moved:.1g} of its value, which no hook changes: padding would train the router. Accepted: "
                "`model.config.output_router_logits = False`; or rows without padding and "
                "`DataCollatorForNeatPacking(model)` without `isolate`."
            )
        if moved is not None:
            self.notes.append(BALANCE)
        elif self.attached.routing is not None:
            self.notes.append(BALANCE_NOT_ASKED_FOR)

    def _label_shift(self) -> bool | None:
        """Measure which label each token of a document is compared with."""
        shifts = measured_shift(self.model, self.probe.alone_inputs(self.probe.sample().rows[0][0]))
        if shifts is False and declared_shift(self.inner):
            self.notes.append(UNSHIFTED)
        return shifts

    def _write_offsets(self, why: str) -> None:
        self.attached.declare_offsets()
        self.probe = Probe(self.model, contract_of(self.model), seed=self.seed)
        self.notes.append(f"batches carry offsets and masks are made inside, because {why}")

    def _check(self) -> Verdict:
        """Judge two rows with every key of a batch, then one row in training mode; the worst counts."""
        verdict = self.probe.judge(self.probe.sample(TWO_ROWS))
        if not self.probe.holds(verdict):
            return verdict
        return verdict.or_worse(self.probe.judge_training(self.probe.sample(ONE_ROW)))

    def _start_again(self) -> None:
        self.attached.take_off_repairs()
        self._repair_long_range()
        self._repair_attention()

    def _repaired(self) -> Verdict:
        self._search()
        after = self._check()
        if not self.probe.holds(after) and (
            placed := self.attached.take_off((RestartPositions.name,))
        ):
            # Positions that only count relative to each other need no restart, and may not take one.
            without = self._check()
            if self.probe.holds(without):
                return without
            for part in placed:
                modules = [(name, self.inner.get_submodule(name)) for name in part.modules]
                repair = RestartPositions(self.attached.entry)
                self.attached.keep(repair, modules, self.attached.put_on(repair, modules))
        return after

    def _repair_long_range(self) -> None:
        """Repair what only shows in long rows or documents, by what the modules say about themselves."""
        for kind in (RotaryTablesPerDocument, TemperatureOfLongRows):
            found = [pair for pair in self.inner.named_modules() if kind.fits(pair[1])]
            if found:
                repair = kind(self.attached.entry)
                self.attached.keep(repair, found, self.attached.put_on(repair, found))

    def _repair_attention(self) -> bool:
        """Repair modules that compute even a document alone otherwise than by eager attention.

        Some add the lazy mask of `neat_varlen` to scores as 0 and 1; some ask for options that it does not have.

        Raises:
            UnsupportedModelError: a module that no repair brings to compute the same.
        """
        if not self.probe.reads_offsets:
            return False
        search = EagerSearch(self.probe)
        found = False
        while (call := search.first()) is not None:
            found = True
            lazy = takes_lazy_mask(call.arguments)
            kinds = [MaskOtherDocuments, MarkOtherDocuments] if lazy else []
            if not self._apply(call, [*kinds, OwnAttention], search):
                key = self.probe.capabilities.attention_key
                raise UnsupportedModelError(
                    f"{type(call.module).__name__} of {type(self.inner).__name__} computes a document under {key!r} "
                    "otherwise than by the model's own eager attention, packed or not, and no "
                    "hook changes that. Accepted: "
                    '`model.set_attn_implementation("sdpa")` or `"eager"`.'
                )
        return found

    def _alike(self, call: ModuleCall, repair: Repair) -> list[tuple[str, nn.Module]]:
        """List the modules that the repair is for: those of the found one's class, where a class has one job."""
        one_job = repair.for_whole_class and not type(call.module).__module__.startswith("torch.")
        return [
            (name, module)
            for name, module in self.inner.named_modules()
            if (name == call.name or (one_job and type(module) is type(call.module)))
            and not self.attached.has(name, repair.name)
        ]

    def _search(self) -> None:
        """Repair one kind of module after the other, until the row parts nowhere any more.

        A forward that raises in a module is repaired there; one that cannot be ends the search, and the check that
        follows tells.
        """
        try:
            search = Search(self.probe)
        except ForwardRaised:
            return
        for _ in range(_MOST_SEARCHES):
            try:
                call = search.first(search.packed())
            except ForwardRaised as raised:
                call = raised.call
                if call is None or call.module is self.inner or not self._repair(search, call):
                    self.notes.append(f"a packed row {Verdict(0, 0, raised.cause)}")
                    return
                continue
            if call is None or call.module is self.inner:
                return
            if not self._repair(search, call):
                search.skip.add(call.name)

    def _repair(self, search: Search, call: ModuleCall) -> bool:
        if _is_whole_model(call):
            return False
        kinds = candidates(
            call.module,
            call.arguments,
            reads_offsets=self.probe.reads_offsets,
            place_only=call.output is not None and search.depends_on_place_only(call),
        )
        return self._apply(call, kinds, search)

    def _apply(
        self,
        call: ModuleCall,
        kinds: Sequence[Callable[[Scope], Repair]],
        search: Search | EagerSearch,
    ) -> bool:
        """Put the first repair that heals on all modules of the found one's class."""
        for kind in kinds:
            repair = kind(self.attached.entry)
            modules = self._alike(call, repair)
            if not any(name == call.name for name, _ in modules):
                continue
            handles = self.attached.put_on(repair, modules)
            if search.heals(call):
                self.attached.keep(repair, modules, handles)
                return True
            for handle in handles:
                handle.remove()
        return False

    def _unpacked(self, found: Verdict) -> Verdict:
        """Run the model on one document per padded row; refuse where that is not exact either."""
        self._start_again()
        entry, after = self.attached.entry, found
        for how in ("plain", "masked", "each"):
            entry.unpack = how
            after = self._check()
            if self.probe.holds(after):
                self.notes.append(LAST_RESORT[how])
                return after
        entry.unpack = None
        key = self.probe.capabilities.attention_key
        raise UnsupportedModelError(
            f"{type(self.inner).__name__} under {key!r} does not keep the documents of a packed row apart: it {found}. "
            f"No hook on its modules changes that; run on one document per padded row, it {after}. Packed rows would "
            "train on mixed documents without a word. Accepted: one document per row, without padding."
        )


def _is_whole_model(call: ModuleCall) -> bool:
    """Whether a module is a whole model inside: those are run at the root, or not at all."""
    return any(name in call.arguments[1] for name in ("input_ids", "inputs_embeds"))


__all__ = ["Applied", "IsolationReport", "isolate", "isolation_of"]
