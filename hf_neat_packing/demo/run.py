"""The demonstration from documents to a reloaded model, one event a phase, for others to show."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_neat_packing._compat import environment
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.contract import DOCUMENT_MAP_KEY
from hf_neat_packing.dataset import pack_dataset
from hf_neat_packing.dataset.packed_dataset import Pack
from hf_neat_packing.demo.exactness import Isolation, check_isolation, plain_row
from hf_neat_packing.demo.inputs import (
    check_output,
    check_positions,
    model_for,
    pack_to_look_at,
    tokenized_documents,
)
from hf_neat_packing.demo.throughput import Speed, compare_speeds, on_device
from hf_neat_packing.demo.training import Training, train
from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import OnOverlong, PackingReport

REPORT_NAME = "demo_report.json"


@dataclass(frozen=True)
class Said:
    """A line about what is there, or, with a topic of its own, about what takes time now."""

    topic: str
    text: str


@dataclass(frozen=True)
class Planned:
    """The plan, and the lengths of the documents in the pack that is looked at below."""

    report: PackingReport
    pack_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """Real tokens per second of three ways to batch one pack's documents."""

    speeds: tuple[Speed, ...]


@dataclass(frozen=True)
class Checked:
    """Isolation of one pack's documents, and of the same row as one causal sequence."""

    packed: Isolation
    control: Isolation


@dataclass(frozen=True)
class Saved:
    """Where the model is, and whether it gives the same logits after it was read back."""

    folder: Path
    same_logits: bool


Event = Said | Planned | Training | Compared | Checked | Saved


def run_demo(
    output: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    column: str | None = None,
    split: str = "train",
    max_length: int = 4096,
    max_documents: int = 50_000,
    on_overlong: OnOverlong = "split",
    steps: int = 40,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Iterator[Event]:
    """Pack documents, train on them, time and check one pack, save the model and read it back.

    Args:
        output: Folder for the model; new, empty, or of an earlier demonstration.
        model: Folder or id of a causal language model; a small random Llama by default.
        data: Source of documents as `load_documents` takes it; the functions of the standard
            library by default.
        column: Column with the text, where it cannot be told.
        split: Split of the data.
        max_length: Tokens of a pack.
        max_documents: Documents taken, from the first on.
        on_overlong: What becomes of documents longer than a pack.
        steps: Optimizer steps, one pack each.
        learning_rate: By default 3e-3 for the small Llama and 2e-5 for a given model.
        seed: Of weights, plan and order.

    Yields:
        An event for each phase, as soon as it is over.

    Raises:
        NeatPackingError: If an input cannot be used, before anything is trained.
    """
    check_output(output, REPORT_NAME)
    _require(steps=steps, max_length=max_length, max_documents=max_documents)
    yield Said("Documents", "reading and tokenizing")
    tokens, tokenizer, said = tokenized_documents(
        model=model, data=data, column=column, split=split, most=max_documents
    )
    yield from (Said("", line) for line in said)
    packed = pack_dataset(tokens, max_length=max_length, on_overlong=on_overlong, seed=seed)
    pack = pack_to_look_at(packed)
    yield Planned(packed.report, tuple(len(ids) for ids in pack["input_ids"]))
    network = model_for(model, tokens, tokenizer, max_length=max_length, seed=seed)
    check_positions(network, packed)
    size = f"{network.num_parameters() / 1e6:.1f} M parameters"
    name = "a Llama with random weights" if model is None else model
    yield Said("Training", f"transformers.Trainer, {steps} steps of one pack")
    yield Said("", f"{name}, {size}")
    rate = learning_rate or (3e-3 if model is None else 2e-5)
    trained = train(network, packed, steps=steps, learning_rate=rate, folder=output, seed=seed)
    yield trained
    yield Said("Speed", "forward and backward of one pack's documents, three ways in turn")
    padding = 0 if tokenizer is None else tokenizer.pad_token_id or 0
    compared = Compared(tuple(compare_speeds(network, pack, pad_token_id=padding)))
    yield compared
    yield Said("Exactness", "one pack, all comparisons bit for bit")
    checked = check_pack(network, pack)
    yield checked
    yield Said("Saving", "safetensors, read back with attn_implementation='neat_varlen'")
    saved = save_and_reload(network, tokenizer, output, pack)
    _write_report(output, packed.report, trained, compared, checked)
    yield saved


def _require(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            option = "--" + name.replace("_", "-")
            raise PlanningError(f"{option} is {value}; give a number of at least 1.")


def check_pack(model: Any, pack: Pack) -> Checked:
    """Check the isolation of a pack's documents, and that the check can fail.

    Args:
        model: A model that attends by `neat_varlen`.
        pack: Nested columns of one pack.
    """
    batch = _batch(model, pack)
    document_map = batch[DOCUMENT_MAP_KEY]
    packed = check_isolation(model, batch, document_map)
    control = check_isolation(model, plain_row(batch), document_map)
    return Checked(packed, control)


def save_and_reload(model: Any, tokenizer: Any, folder: Path, pack: Pack) -> Saved:
    """Save a model with safetensors, read it back, and compare the logits of a pack bit for bit.

    Args:
        model: The model.
        tokenizer: Saved beside it, if there is one.
        folder: Where to.
        pack: Nested columns of one pack.
    """
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="neat_varlen")
    again.to(model.device)
    logits = []
    with torch.no_grad():
        for network in (model.eval(), again.eval()):
            batch = _batch(network, pack)
            del batch["labels"]
            logits.append(network(**batch).logits)
    return Saved(folder, torch.equal(*logits))


def _batch(model: Any, pack: Pack) -> dict[str, Any]:
    return on_device(DataCollatorForNeatPacking(model)([pack]), model.device)


def _write_report(
    output: Path,
    report: PackingReport,
    trained: Training,
    compared: Compared,
    checked: Checked,
) -> None:
    figures = {
        "environment": environment(),
        "packing": report.to_dict(),
        "training": asdict(trained),
        "speeds": [asdict(speed) for speed in compared.speeds],
        "isolation": asdict(checked.packed),
        "control": asdict(checked.control),
    }
    text = json.dumps(figures, indent=2) + "\n"
    (output / REPORT_NAME).write_text(text, encoding="utf-8")
