"""Packed rows through torch's own pipeline splitter, in one process and in two."""

import os
import subprocess
import sys
from pathlib import Path

import contract_pipeline_stages as pipeline
import pytest
import torch
from contract_exactness import assert_same_gradients, double, gradients, summed_loss
from torch import nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from hf_neat_packing.errors import BoundaryError
from hf_neat_packing.hooks.metadata import remove_entry_hook


def run_split(stages, batch, chunks):
    """Split a batch as a schedule does, run both stages on each part, and sum the losses."""
    kwargs = {name: batch[name] for name in pipeline.boundary_names(batch)}
    args, kwargs = split_args_kwargs_into_chunks((batch["input_ids"],), kwargs, chunks)
    outputs = [
        stages[1](stages[0](*arg, **kwarg), **kwarg)
        for arg, kwarg in zip(args, kwargs, strict=True)
    ]
    logits = torch.cat(outputs)
    loss = summed_loss(logits, batch["labels"])
    return logits.detach(), gradients(nn.ModuleList(stages), loss)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("layout", pipeline.LAYOUTS)
def test_split_batches_give_the_logits_and_gradients_of_documents_alone(layout, chunks):
    stages, docs, batch = pipeline.make(layout)
    logits, found = run_split(stages, batch, chunks)
    alone, alone_gradients = pipeline.run_alone(stages, docs)
    truth, true_gradients = pipeline.run_alone([double(one) for one in stages], docs)
    pipeline.check_logits(logits, batch, docs, alone, truth)
    assert_same_gradients(found, alone_gradients, true_gradients)


def test_without_the_entry_hook_split_offsets_are_those_of_other_tokens():
    stages, _, batch = pipeline.make("varlen")
    whole, _ = run_split(stages, batch, 1)
    for stage in stages:
        remove_entry_hook(stage)
    # Unsplit, the collator's own offsets are right and no hook is needed.
    assert torch.equal(run_split(stages, batch, 1)[0], whole)
    # The second part has offsets 7 to 12 for tokens 0 to 6: a kernel reads past the end.
    with pytest.raises((RuntimeError, IndexError)):
        run_split(stages, batch, 2)


def test_without_the_entry_hook_the_native_bundle_does_not_arrive_flat():
    stages, _, batch = pipeline.make("native")
    for stage in stages:
        remove_entry_hook(stage)
    with pytest.raises(AssertionError, match="flattens"):
        run_split(stages, batch, 2)


@pytest.mark.parametrize("layout", ["native", "varlen"])
def test_a_microbatch_of_padding_alone_is_a_named_error(layout):
    stages, _, batch = pipeline.make(layout)
    for name in ("_packed_seq_ids", "attention_mask"):
        if name in batch:
            batch[name][1] = 0
    if layout == "native":
        batch["packed_token_indices"][1] = -1
        batch["cu_seqlens"][1, 1:] = -1
    with pytest.raises(BoundaryError, match="padding"):
        run_split(stages, batch, 2)


def test_two_processes_train_two_stages_exactly(tmp_path):
    script = Path(pipeline.__file__)
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
        for layout in pipeline.LAYOUTS:
            assert f"exact: {layout} 1" in output
            assert f"exact: {layout} 2" in output
