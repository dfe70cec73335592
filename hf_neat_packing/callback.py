"""`PackingCallback`: what was true when the collator was built is checked again when training begins.

Between the two, the model may have been reloaded (a saved config does not hold its attention key),
wrapped, given another key, or another collator may have taken the place of ours.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from .capabilities import model_capabilities
from .collator import DataCollatorForNeatPacking
from .columns import LABEL_MASKS
from .contract import METADATA_KEYS, VARLEN_KEYS, PackingCapabilities
from .dry_run import (
    IsolationProof,
    require_balance_without_padding,
    require_known_rotary_limit,
    require_label_rule,
)
from .errors import ContractError
from .features import split_packs
from .hooks.metadata import entry_hook, rebuild_varlen_kwargs_at_model_entry
from .remembered import prove_isolation_once
from .wrappers import unwrap

_ALWAYS = ("packed_mask_type", "layout", "requires_packed_sequence_metadata")
_OF_MASKS = ("layer_masks", "mask_delivery", "is_causal")


class PackingCallback(TrainerCallback):  # type: ignore[misc]
    """Check a Trainer's packing before its first step: `Trainer(..., callbacks=[PackingCallback()])`.

    Raises at train begin unless the loader's collator is ours, the model's key still resolves to the
    collator's layout, nothing between loader and model cuts the batch where it must not be cut, no sampler
    reads a pack's number of documents as its length, and a dry run of two documents shows that every
    attention layer keeps them apart.

    Args:
        skip_dry_run: names of model classes for which the two documents are not run; there is no switch for all.
            The run is three forwards of a few tokens, and one that passed is remembered under `HF_HOME`.

    Attributes:
        proof: what the dry run measured, once training has begun.
        remembered: whether an earlier train start of the same model and versions measured it.

    Raises:
        ContractError: `skip_dry_run` is no name of a class.
    """

    def __init__(self, *, skip_dry_run: Collection[str] = ()) -> None:
        self.skip_dry_run = _class_names(skip_dry_run)
        self.proof: IsolationProof | None = None
        self.remembered = False
        self._evaluated: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check everything once, before the first batch.

        Raises:
            ContractError: collator, model and loader do not fit together.
            UnsupportedModelError: the model mixes documents.
        """
        model, loader = kwargs["model"], kwargs.get("train_dataloader")
        collator = require_packing_collator(getattr(loader, "collate_fn", None))
        require_same_layout(model, collator)
        _require_uncut_batches(args, loader, model, collator.capabilities)
        _require_no_grouping(args)
        _require_kept_masks(loader)
        require_known_rotary_limit(model, collator)
        require_balance_without_padding(model, collator)
        if type(unwrap(model)).__name__ not in self.skip_dry_run:
            self.proof, self.remembered = prove_isolation_once(model, collator)
            if self.proof.answers_per_token:
                require_label_rule(model, collator, self.proof.shifts_labels)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check once an evaluation, at its first batch, that no document will be missing in its metrics.

        Raises:
            ContractError: the last batch would lose documents.
        """
        loader = kwargs.get("eval_dataloader")
        if loader is not self._evaluated:
            self._evaluated = loader
            by_document = self.proof is not None and not self.proof.answers_per_token
            _require_whole_evaluation(args, loader, kwargs.get("model"), by_document)


def _class_names(names: Collection[str]) -> frozenset[str]:
    """Read the names of classes; True would switch the check off for whatever model comes."""
    given = [names] if isinstance(names, str) else names
    if isinstance(given, Collection) and all(
        isinstance(name, str) and name.isidentifier() for name in given
    ):
        return frozenset(given)
    raise ContractError(
        f"skip_dry_run={names!r}: the dry run is left out for classes by their names, so that another model is still "
        'checked. Write skip_dry_run=("LlamaForCausalLM",).'
    )


def require_packing_collator(collate_fn: Any) -> DataCollatorForNeatPacking:
    """Return the packing collator of a loader, also from inside the Trainer's column remover.

    Raises:
        ContractError: another collator, which would say nothing about documents.
    """
    inner = getattr(collate_fn, "data_collator", collate_fn)
    if isinstance(inner, DataCollatorForNeatPacking):
        return inner
    raise ContractError(
        f"The train loader collates with {type(inner).__name__}, which writes no boundaries, so the documents of a row "
        "would see each other. Pass `data_collator=DataCollatorForNeatPacking(model)` to the Trainer."
    )


def require_same_layout(model: nn.Module, collator: DataCollatorForNeatPacking) -> None:
    """Raise unless a model still reads what its collator writes.

    Args:
        model: the model as it is now.
        collator: built from the model as it was, or from a contract.

    Raises:
        ContractError: naming both sides and why.
    """
    written, read = collator.capabilities, model_capabilities(model)
    names = [*_ALWAYS]
    names += _OF_MASKS if read.packed_mask_type == "block_causal" else []
    names += ["mask_dtype"] if read.layout == "additive_4d" else []
    changed = [name for name in names if getattr(written, name) != getattr(read, name)]
    details = [f"{name}: {getattr(written, name)!r}, {getattr(read, name)!r}" for name in changed]
    if collator.position_ids_start != read.position_ids_start:
        details.append(
            f"position_ids_start: {collator.position_ids_start}, {read.position_ids_start}"
        )
    if read.requires_seq_idx and not collator.return_seq_idx:
        details.append("seq_idx: not written, needed by recurrent layers")
    if details:
        raise ContractError(
            f"{type(unwrap(model)).__name__} does not read what the collator writes (collator, model: "
            f"{'; '.join(details)}).\nThe collator writes {written}\nThe model reads {read}\nA reloaded model is "
            "back on its default attention. Set the key, then build `DataCollatorForNeatPacking(model)`."
        )


def _require_uncut_batches(
    args: Any, loader: Any, model: nn.Module, capabilities: PackingCapabilities
) -> None:
    """Refuse what cuts and joins batches on dimension 0, where a key has no row for each row of the batch."""
    found = _cutters(args, loader)
    if not found:
        return
    hook = entry_hook(model)
    rebuilt = hook is not None and hook.hook is rebuild_varlen_kwargs_at_model_entry
    varlen = capabilities.packed_mask_type == "flash_varlen"
    # Accelerate joins the batches of several processes, and cannot join the plain ints of a batch.
    joined = found[0].startswith("dispatch_batches") and getattr(args, "world_size", 1) > 1
    ints = varlen or capabilities.requires_packed_sequence_metadata
    if (not varlen or rebuilt) and not (joined and ints):
        _require_rows_in_every_key(loader, found)
        return
    raise ContractError(
        f"{' and '.join(found)} cuts and joins batches on dimension 0, but this batch holds keys without a row for "
        f"each row ({'offsets' if varlen else 'the bundle'} and plain ints), so its parts would get the boundaries of "
        'other tokens. Set `accelerator_config={"dispatch_batches": False, "split_batches": False}` and one process '
        "per GPU. Where only rows are cut, give every pack a row of its own (`rows='packs'`) and rebuild the "
        "offsets of each part: `configure_packing_for_models([model])`."
    )


def _require_rows_in_every_key(loader: Any, found: list[str]) -> None:
    """Refuse a batch of which some tensor is not as long as there are rows: of documents, images or position axes."""
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return
    batch = loader.collate_fn([dataset[index] for index in range(min(len(dataset), 4))])
    rows = batch["input_ids"].shape[0]
    loose = [
        name
        for name, value in batch.items()
        if name not in (*VARLEN_KEYS, *METADATA_KEYS) and not _has_rows(value, rows)
    ]
    if loose:
        raise ContractError(
            f"{' and '.join(found)} cuts and joins batches on dimension 0, and a batch of {rows} rows holds {loose}, "
            "which have an entry for each document, image or axis instead: its parts would get those of other rows. "
            'Set `accelerator_config={"dispatch_batches": False, "split_batches": False}` and one process per GPU.'
        )


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, dict):
        return all(_has_rows(part, rows) for part in value.values())
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows


def _require_no_grouping(args: Any) -> None:
    """Refuse samplers that sort by `len(input_ids)`, which says nothing about a pack."""
    strategy = getattr(args, "train_sampling_strategy", None)
    if strategy in ("group_by_length", "batch_rebalance"):
        raise ContractError(
            f"train_sampling_strategy={strategy!r} takes `len(input_ids)` for the length of an example; in a pack that "
            "is the number of its documents, so packs would be sorted by it, and batches would be neither even nor "
            "shuffled. Packs have near the same number of tokens already. Write "
            'train_sampling_strategy="random"; for like attention cost on all processes see `PackedTrainerMixin`.'
        )


def _require_kept_masks(loader: Any) -> None:
    """Refuse masks of trained tokens that the Trainer's column remover takes away before they become labels."""
    kept = getattr(getattr(loader, "collate_fn", None), "signature_columns", None)
    names = getattr(getattr(loader, "dataset", None), "column_names", None)
    if kept is None or names is None or "labels" in names:
        return
    lost = [name for name in LABEL_MASKS if name in names and name not in kept]
    if lost:
        raise ContractError(
            f"The Trainer removes the columns {lost}, which the model's forward does not name, so every token would be "
            "trained on. Write `dataset = dataset.map(hf_neat_packing.labels_from_masks)` before packing, or set "
            "`remove_unused_columns=False`: then the collator makes labels of them."
        )


def _require_whole_evaluation(args: Any, loader: Any, model: Any, by_document: bool) -> None:
    """Refuse batches of several packs where a model answers once a document.

    Accelerate cuts what it gathers of the last batch to the number of its examples, which are packs.
    """
    by_document |= getattr(unwrap(model), "loss_type", None) == "ForSequenceClassification"
    together = getattr(args, "eval_batch_size", 1) * getattr(args, "world_size", 1)
    dataset: Any = getattr(loader, "dataset", None)
    if not by_document or together == 1 or not hasattr(dataset, "__getitem__"):
        return
    if split_packs([dataset[0]])[1]:
        raise ContractError(
            f"Evaluation takes {together} packs at a time from a model that answers once a document, and accelerate "
            "cuts the answers of the last batch to its number of packs: documents would be missing in the metrics. "
            "Write `per_device_eval_batch_size=1` on one process, or evaluate documents instead of packs."
        )


def _cutters(args: Any, loader: Any) -> list[str]:
    """Name what lies between loader and model and cuts batches; the dispatcher first."""
    accelerator = getattr(args, "accelerator_config", None)
    found = []
    if getattr(accelerator, "dispatch_batches", False):
        found.append("dispatch_batches")
    elif type(loader).__name__ == "DataLoaderDispatcher":
        found.append("dispatch_batches (the default of an iterable dataset)")
    if getattr(accelerator, "split_batches", False):
        found.append("split_batches")
    if getattr(args, "n_gpu", 1) > 1:
        found.append("DataParallel (several visible GPUs and one process)")
    return found
