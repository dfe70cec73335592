"""Small forwards that show whether a model keeps the documents of a row apart, and where it first does not.

Legend: `B` rows, `S` tokens in a row, `V` values per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capabilities import get_model_attn_implementation, get_packing_capabilities
from ..contract import DOCUMENT_MAP_KEY, PackingCapabilities, varlen_kwargs_from_document_map
from ..errors import UnsupportedModelError
from ..layouts import reads_varlen_kwargs
from ..masks import masks_for
from ..positions import position_ids_from_document_map, seq_idx_from_document_map
from ..wrappers import forward_parameters, takes_any_keyword, unwrap
from .conditions import plain_ids, under_key
from .record import ModuleCall, Recording, relative_difference
from .samples import Sample, Verdict, leaf_embeddings

ONE_ROW = ((7, 1, 5),)
TWO_ROWS = ((7, 4), (5, 1, 5))
"""Document lengths of the rows that are tried. Their sums are prime, so that no other dimension has them."""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that share statistics over all tokens of a batch in training mode."""


class ForwardRaised(Exception):
    """A forward of a probe raised.

    Attributes:
        cause: what it raised.
        call: the module in which it did, or None where it was never entered.
    """

    def __init__(self, cause: Exception, call: ModuleCall | None) -> None:
        super().__init__(str(cause))
        self.cause, self.call = cause, call


class Probe:
    """Runs a model on tiny documents, alone and packed.

    Args:
        model: the model, in any number of wrappers.
        seed: of the token ids.

    Attributes:
        capabilities: the contract by which batches are written.
        reads_offsets: whether the attention takes boundaries as offsets.
        tolerance: largest relative difference from a document alone that counts as rounding.
    """

    def __init__(
        self, model: nn.Module, capabilities: PackingCapabilities, *, seed: int = 0
    ) -> None:
        self.model, self.inner = model, unwrap(model)
        self.capabilities = capabilities
        self.reads_offsets = reads_varlen_kwargs(capabilities.attention_key or "")
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.eps = torch.finfo(dtype).eps
        self.tolerance = max(1e-3, 20 * self.eps)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._ids = plain_ids(self.inner)
        self._generator = torch.Generator().manual_seed(seed)
        self._parameters = forward_parameters(self.inner) or {}

    def sample(self, rows: Sequence[Sequence[int]] = ONE_ROW) -> Sample:
        """Draw documents of the given lengths."""
        drawn = tuple(tuple(self._draw(length) for length in row) for row in rows)
        numbers = [
            torch.repeat_interleave(torch.arange(1, len(row) + 1), torch.tensor(row))
            for row in rows
        ]
        return Sample(drawn, torch.stack(numbers))

    def exchanged(self, sample: Sample, keep: Callable[[int], bool]) -> Sample:
        """Exchange the tokens of every document whose number is not kept."""
        numbers = iter(range(len(sample.document_map.unique()) * len(sample.rows)))
        rows = tuple(
            tuple(ids if keep(next(numbers)) else self.other(ids) for ids in row)
            for row in sample.rows
        )
        return Sample(rows, sample.document_map)

    def _draw(self, length: int) -> Tensor:
        picks = torch.randint(len(self._ids), (length,), generator=self._generator)
        return self._ids[picks]

    def other(self, document: Tensor) -> Tensor:
        """Exchange every token of a document for another one."""
        shifted = torch.searchsorted(self._ids, document) + len(self._ids) // 2
        return self._ids[shifted % len(self._ids)]

    def packed_inputs(self, sample: Sample, *, every_key: bool) -> dict[str, Any]:
        """Write the batch of a sample as the collator does.

        Args:
            sample: the documents.
            every_key: varlen kwargs and `seq_idx` too; without them only what says the same to hooks.
        """
        document_map = sample.document_map.to(self.device)
        batch: dict[str, Any] = {
            "input_ids": torch.stack([torch.cat(row) for row in sample.rows]).to(self.device),
            "position_ids": position_ids_from_document_map(
                document_map, start=self.capabilities.position_ids_start
            ),
            DOCUMENT_MAP_KEY: document_map,
        }
        if self.capabilities.packed_mask_type == "block_causal":
            masks = masks_for(document_map.cpu(), self.capabilities)
            batch["attention_mask"] = _on(masks, self.device)
        elif self.capabilities.packed_mask_type == "document_ids":
            batch["attention_mask"] = document_map
        elif every_key:
            batch |= varlen_kwargs_from_document_map(document_map)
        if every_key and self.capabilities.requires_seq_idx:
            batch["seq_idx"] = seq_idx_from_document_map(document_map)
        return batch

    def alone_inputs(self, document: Tensor) -> dict[str, Any]:
        """Write the batch of one document."""
        inputs: dict[str, Any] = {"input_ids": document[None].to(self.device)}
        if "use_cache" in self._parameters or takes_any_keyword(self._parameters):
            config = getattr(self.inner, "config", None)
            if hasattr(config, "use_cache") or "use_cache" in self._parameters:
                inputs["use_cache"] = False
        return inputs

    def alone(self, document: Tensor) -> tuple[list[ModuleCall], Tensor]:
        """Run one document and record every module; the truth, so not by an attention of our own."""
        with under_key(self.inner, "eager", self.reads_offsets):
            return self.recorded(self.alone_inputs(document))

    def values(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run the model without gradients and return its values per token, `[B, S, V]`."""
        with torch.no_grad():
            output = self.model(**inputs)
        rows, length = inputs["input_ids"].shape
        found = _values(output, rows, length)
        if found is None:
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} returns no tensor of [{rows}, {length}, ...], so nothing shows "
                "whether documents are kept apart. Accepted: models that return one value or vector per token."
            )
        return found.detach()

    def recorded(self, inputs: Mapping[str, Any]) -> tuple[list[ModuleCall], Tensor]:
        """Run the model and record every module."""
        with Recording(self.inner) as recording:
            try:
                values = self.values(inputs)
            except Exception as raised:
                raise ForwardRaised(raised, recording.unfinished()) from raised
        return recording.calls, values

    def judge(self, sample: Sample) -> Verdict:
        """Compare each document of a packed forward with itself alone, and with other neighbours.

        A forward that raises is told in the verdict, not raised.
        """
        try:
            packed = self.values(self.packed_inputs(sample, every_key=True))
            error = max(
                relative_difference(packed[row, place], self.alone(ids)[1][0])
                for row, place, ids in sample.documents()
            )
            moved = self._moved(sample, packed)
            return Verdict(error, moved, reached=moved > 0 and self._reached(sample, moved))
        except Exception as raised:
            return Verdict(float("inf"), float("inf"), raised)

    def judge_training(self, sample: Sample) -> Verdict:
        """Exchange the neighbours of each document in training mode, where kernels may take other paths.

        Random numbers are the same in every forward. Nothing is judged where a forward does not repeat even so, where
        batch norm couples all tokens, or where a document alone raises.
        """
        if any(isinstance(module, BATCH_NORMS) for module in self.inner.modules()):
            return Verdict(0.0, 0.0)
        inputs = self.packed_inputs(sample, every_key=True)
        self.inner.train()
        try:
            try:
                self._seeded(self.alone_inputs(sample.rows[0][0]))
            except Exception:
                return Verdict(0.0, 0.0)
            packed = self._seeded(inputs)
            if relative_difference(self._seeded(inputs), packed) > 0:
                return Verdict(0.0, 0.0)
            moved = self._moved(sample, packed)
            return Verdict(0.0, moved, reached=moved > 0 and self._reached(sample, moved))
        except Exception as raised:
            return Verdict(float("inf"), float("inf"), raised)
        finally:
            self.inner.eval()

    def _seeded(self, inputs: Mapping[str, Any]) -> Tensor:
        torch.manual_seed(0)
        return self.values(inputs)

    def _moved(self, sample: Sample, packed: Tensor) -> float:
        """Largest relative change of any document when every second other one is exchanged."""
        changes = [0.0]
        for parity in (0, 1):
            other = self.exchanged(sample, _every_second(parity))
            values = self._seeded(self.packed_inputs(other, every_key=True))
            changes += [
                relative_difference(values[row, place], packed[row, place])
                for number, (row, place, _) in enumerate(sample.documents())
                if number % 2 == parity
            ]
        return max(changes)

    def _reached(self, sample: Sample, moved: float) -> bool:
        """Whether documents that moved a little did so because others reach them.

        Experts regroup their tokens when other documents change, which rounds differently; no gradient crosses
        there. Where no gradient can be had, more than the rounding of some sums counts.
        """
        try:
            with leaf_embeddings(self.inner) as leaves, torch.enable_grad():
                torch.manual_seed(0)
                inputs = self.packed_inputs(sample, every_key=True)
                rows, length = inputs["input_ids"].shape
                values = _values(self.model(**inputs), rows, length)
                assert values is not None
            (embeddings,) = leaves
            for parity in (0, 1):
                seen = torch.zeros(rows, length, dtype=torch.bool, device=values.device)
                for number, (row, place, _) in enumerate(sample.documents()):
                    seen[row, place] = number % 2 == parity
                weights = torch.randn(values.shape, generator=self._generator).to(values)
                loss = (values * weights)[seen].sum()
                (gradient,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
                if bool(gradient.view(rows, length, -1)[~seen].any()):
                    return True
        except Exception:
            return moved > 64 * self.eps
        return False

    def holds(self, verdict: Verdict) -> bool:
        """Whether documents were kept apart and computed as alone."""
        if verdict.raised is not None or verdict.reached:
            return False
        return max(verdict.error, verdict.moved) <= self.tolerance


def contract_of(model: nn.Module) -> PackingCapabilities:
    """Look up by which contract the batches of a model are written.

    Raises:
        UnsupportedModelError: none of the layouts carries what the model's layers need.
    """
    return get_packing_capabilities(get_model_attn_implementation(model), model)


def _every_second(parity: int) -> Callable[[int], bool]:
    return lambda number: number % 2 == parity


def _values(output: Any, rows: int, length: int) -> Tensor | None:
    logits = getattr(output, "logits", None)
    parts = output.values() if isinstance(output, Mapping) else output
    found = [logits] if logits is not None else [parts] if isinstance(parts, Tensor) else parts
    for value in found:
        per_token = isinstance(value, Tensor) and tuple(value.shape[:2]) == (rows, length)
        if per_token and value.is_floating_point():
            return value
    return None


def _on(masks: Any, device: torch.device) -> Any:
    if isinstance(masks, dict):
        return {name: _on(mask, device) for name, mask in masks.items()}
    return masks.to(device) if masks is not None else None
