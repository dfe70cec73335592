"""What each of two processes does: packed training under torch's parallelisms, against ONE process.

Run by test_distributed.py with the variables of torchrun set: `python distributed_training.py FOLDER`.
Each check trains a few steps on packs and records how far weights and losses are from one process
that trains on the same documents unpacked, in units of what rounding allows; and the same for a
control whose batches have lost their boundaries.
"""

import contextlib
import datetime
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_pipeline import check_pipelines
from distributed_processes import join_group, read_records, record
from distributed_reference import (
    BOUNDARIES,
    OneProcess,
    documents_of_steps,
    optimizer_of,
    packs,
    samplers,
    weights_of,
    whole,
)
from distributed_streams import check_plans, check_streams
from sdpa_toys import Decoder, alone, make_batch
from tiny_models import tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    PackingCallback,
    audit_model,
    isolate,
    pack_sdpa_only_model,
)
from hf_neat_packing.audit import zoo
from hf_neat_packing.dataset.packed_trainer import PackedTrainerMixin
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.errors import UnsupportedModelError

FOLDER = Path(sys.argv[1])


def train(model, *, ranks, boundaries=True):
    """Train on this rank's packs, as a loop of one's own does; `ranks` share the documents.

    Returns:
        Whole weights after the last step, and the loss of each step over all ranks.
    """
    packed, rank = packs(), dist.get_rank() if ranks > 1 else 0
    loader = DataLoader(
        packed,
        batch_sampler=samplers(packed, ranks)[rank],
        collate_fn=DataCollatorForNeatPacking(model),
    )
    optimizer, losses = optimizer_of(model), []
    for batch in loader:
        if not boundaries:
            batch = {name: value for name, value in batch.items() if name not in BOUNDARIES}
        targets = (batch["labels"][:, 1:] != -100).sum()
        if ranks > 1:
            dist.all_reduce(targets)
        loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
        # Gradients are averaged over ranks, and the loss is a sum over them.
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return weights_of(model), losses


def unprefixed(weights):
    return {name.removeprefix("module."): value for name, value in weights.items()}


def compare(name, one, build, *, ranks, control=True):
    """Train once with boundaries and, for the control, once without; record how far they are."""
    weights, losses = train(build(), ranks=ranks)
    weights = unprefixed(weights)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    found = {
        "excess": one.excess(weights),
        "loss_excess": one.loss_excess(losses),
        "parameters": len(weights),
        "all_parameters": len(one.start),
        "steps": len(losses),
        "ranks_agree": all(
            torch.equal(gathered[0][key], other[key]) for other in gathered for key in weights
        ),
    }
    if control:
        mixed, _ = train(build(), ranks=ranks, boundaries=False)
        found["control"] = one.excess(unprefixed(mixed))
    record(FOLDER, dist.get_rank(), name, **found)


def sharded(model, layers, **options):
    for layer in layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def llama():
    return tiny_model("llama")


def sharded_llama(model=None, **options):
    return sharded(model or llama(), lambda model: model.model.layers, **options)


def recomputing(*, reentrant):
    model = llama().train()
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def after_dry_run(model):
    """The dry run of `PackingCallback` runs forwards, which are collective in a sharded model; an audit refuses it."""
    if isinstance(model, FSDPModule):
        with pytest.raises(UnsupportedModelError, match="is sharded"):
            audit_model(model)
    proof = prove_isolation(model, DataCollatorForNeatPacking(model))
    assert len(proof.layers) == 2
    return model


def check_data_parallel():
    one = OneProcess(tiny_model("llama", "sdpa"), documents_of_steps(packs(), 2))
    ways = {
        "ddp": lambda: DistributedDataParallel(llama()),
        "ddp, dry run before": lambda: after_dry_run(DistributedDataParallel(llama())),
        "ddp, use_reentrant=True": lambda: DistributedDataParallel(recomputing(reentrant=True)),
        "ddp, use_reentrant=False": lambda: DistributedDataParallel(recomputing(reentrant=False)),
        "fsdp2": sharded_llama,
        "fsdp2, dry run before": lambda: after_dry_run(sharded_llama()),
        "fsdp2, use_reentrant=False": lambda: sharded_llama(recomputing(reentrant=False)),
        "fsdp2, offloaded": lambda: sharded_llama(
            offload_policy=CPUOffloadPolicy(pin_memory=False)
        ),
    }
    for name, build in ways.items():
        compare(name, one, build, ranks=2, control=name in ("ddp", "fsdp2"))


class BalancedTrainer(PackedTrainerMixin, Trainer):
    """The Trainer, with packs dealt by cost."""


def check_trainer():
    """The Trainer as torchrun starts it: it wraps the model and counts targets over ranks by itself."""
    one = OneProcess(tiny_model("llama", "sdpa"), documents_of_steps(packs(), 2, seed=42))
    for name, callbacks in (("trainer", [PackingCallback()]), ("trainer, control", [])):
        model = llama()
        collator = DataCollatorForNeatPacking(model)
        arguments = TrainingArguments(
            str(FOLDER / f"trainer-{dist.get_rank()}"),
            num_train_epochs=1,
            per_device_train_batch_size=1,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = BalancedTrainer(
            model,
            arguments,
            train_dataset=packs(),
            data_collator=collator if callbacks else without_boundaries(collator),
            optimizers=(optimizer_of(model), None),
            callbacks=callbacks,
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        record(
            FOLDER,
            dist.get_rank(),
            name,
            excess=one.excess(weights_of(model)),
            world_size=arguments.world_size,
            steps=trainer.state.global_step,
            losses=losses,
            expected_losses=one.true_losses,
        )


def without_boundaries(collator):
    def collate(features):
        return {k: v for k, v in collator(features).items() if k not in BOUNDARIES}

    return collate


def check_tensor_parallel():
    folder = FOLDER / "llama"
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    one = OneProcess(tiny_model("llama", "sdpa"), documents_of_steps(packs(), 1))

    def split():
        return AutoModelForCausalLM.from_pretrained(
            folder,
            distributed_config=DistributedConfig(tp_plan="auto"),
            attn_implementation="neat_varlen",
            dtype=torch.float32,
        )

    halves = split().model.layers[0].self_attn.q_proj.weight.to_local()
    assert halves.shape == (16, 32), "the plan of transformers has split the heads"
    compare("tensor parallel", one, split, ranks=1)
    dry = {"build": lambda: after_dry_run(split()), "control": False}
    compare("tensor parallel, dry run before", one, ranks=1, **dry)


def check_recurrent():
    """Hooks of `isolate`, put on before the wrapper and after it."""

    def wrap(model, wrapper):
        if wrapper == "ddp":
            return DistributedDataParallel(model)
        return sharded(model, lambda model: model.get_decoder().layers)

    def isolated(model):
        isolate(model)
        return model

    for model_type in ("mamba2", "qwen3_5_text"):

        def plain(model_type=model_type):
            return zoo.tiny_model(model_type, attn_implementation="neat_varlen").train()

        one = OneProcess(plain(), documents_of_steps(packs(), 2))
        for wrapper in ("ddp", "fsdp2"):

            def before(wrapper=wrapper, plain=plain):
                return wrap(isolated(plain()), wrapper)

            def after(wrapper=wrapper, plain=plain):
                return isolated(wrap(plain(), wrapper))

            if model_type == "mamba2" or wrapper == "ddp":
                name = f"{model_type}, isolate before {wrapper}"
                compare(name, one, before, ranks=2, control=False)
            if model_type == "mamba2" or wrapper == "fsdp2":
                name = f"{model_type}, isolate after {wrapper}"
                compare(name, one, after, ranks=2, control=wrapper == "fsdp2")


def check_sdpa_only():
    """Hooks of `pack_sdpa_only_model`: gradients of different rows on each rank, summed."""
    maps = [[[1, 1, 1, 1, 1, 2, 2, 3]], [[1, 2, 3, 3, 3, 3, 4, 4]]]
    batches = [make_batch(document_map, seed) for seed, document_map in enumerate(maps)]
    own, upstream = batches[dist.get_rank()]
    expected = {}
    for batch, weights in batches:
        for name, gradient in alone(Decoder(), batch, weights)[1].items():
            expected[name] = expected.get(name, 0) + gradient
    for wrapper in ("ddp", "fsdp2"):
        for packing in (pack_sdpa_only_model, contextlib.nullcontext):
            model = Decoder(recompute="reentrant" if wrapper == "ddp" else None)
            inputs = own if packing is pack_sdpa_only_model else {**own, "_packed_seq_ids": None}
            if packing is not pack_sdpa_only_model:
                del inputs["_packed_seq_ids"]
            with packing(model):
                wrapped = (
                    DistributedDataParallel(model)
                    if wrapper == "ddp"
                    else sharded(model, lambda model: model.layers)
                )
                (wrapped(**inputs) * upstream).sum().mul(2).backward()
            found = {name: whole(p.grad) for name, p in model.named_parameters()}
            worst = max(
                float((found[name] - value).norm() / value.norm().clamp_min(1e-9))
                for name, value in expected.items()
            )
            kind = "exact" if packing is pack_sdpa_only_model else "control"
            record(FOLDER, dist.get_rank(), f"sdpa only, {wrapper}, {kind}", relative=worst)


def check_silent_rank():
    """The second rank stops answering in the middle of a step; how the first one fares."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    join_group(FOLDER, "second-group", timeout=datetime.timedelta(seconds=3))
    model = DistributedDataParallel(llama())
    batch = DataCollatorForNeatPacking(model)([packs()[0]])
    if rank == 1:
        while "silent rank" not in read_records(FOLDER, 0):
            time.sleep(0.1)
        return
    try:
        model(**batch, use_cache=False).loss.backward()
        found = {"error": "", "message": "the step went on without the other rank"}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    record(FOLDER, rank, "silent rank", **found)


def main():
    join_group(FOLDER, timeout=datetime.timedelta(seconds=120))
    for check in (
        check_data_parallel,
        check_trainer,
        check_tensor_parallel,
        check_recurrent,
        check_sdpa_only,
        lambda: check_pipelines(FOLDER),
        lambda: check_plans(FOLDER),
        lambda: check_streams(FOLDER),
        check_silent_rank,
    ):
        began = time.monotonic()
        check()
        print(f"{time.monotonic() - began:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
