"""`accelerate launch` starts two real processes, and they train as one does on documents alone."""

import itertools
import os
import runpy
import signal
import subprocess
import sys

import pytest
import torch
from accelerate.utils import concatenate, slice_tensors
from distributed_processes import TESTS, environment
from distributed_reference import OneProcess, train_alone, weights_of
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.dataset.samplers import RankBalancedPackSampler
from hf_neat_packing.errors import BoundaryError

EXAMPLE = TESTS.parent / "examples" / "accelerate_two_processes.py"
UPDATES, LEARNING_RATE = 4, 0.3


def launch(folder, *words):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    command += ["--dynamo_backend=no", "--main_process_port=0", str(EXAMPLE), *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        shown, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, shown[-3000:]
    return shown


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def test_the_example_trains_on_two_processes_as_one_does_on_documents_alone(tmp_path):
    shown = launch(tmp_path, "--updates", str(UPDATES), "--output", "out")
    assert "2 processes on cpu" in shown
    example = runpy.run_path(str(EXAMPLE))
    packs = example["packs_of_docstrings"](512)
    samplers = [RankBalancedPackSampler(packs, num_ranks=2, rank=rank) for rank in range(2)]
    updates = [
        [torch.tensor(ids.tolist()) for pack in a + b for ids in packs[pack]["input_ids"]]
        for a, b in itertools.islice(zip(*samplers, strict=True), UPDATES)
    ]
    model = example["load_model"](None)
    one = OneProcess(model, updates, optimizer_of=sgd)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert one.excess(weights_of(trained)) <= 1
    printed = [float(line.split()[3]) for line in shown.splitlines() if line.startswith("update ")]
    assert printed == pytest.approx(one.true_losses, abs=6e-5), "as far as it prints them"
    # The control: rows without boundaries, each of them one document.
    rows = [
        [
            torch.cat([torch.tensor(ids.tolist()) for ids in packs[pack]["input_ids"]])
            for pack in a + b
        ]
        for a, b in itertools.islice(zip(*samplers, strict=True), UPDATES)
    ]
    assert one.excess(train_alone(model, rows, optimizer_of=sgd)[0]) > 100


def test_c57_what_accelerate_cuts_or_joins_on_the_first_axis_is_an_error_and_never_mixes():
    model = tiny_model("llama")
    collator = DataCollatorForNeatPacking(model)
    batches = [
        collator([{"input_ids": [5] * n} for n in lengths]) for lengths in ((4, 5), (7,), (2, 3, 3))
    ]
    # `dispatch_batches` joins what the processes will get.
    with pytest.raises((TypeError, RuntimeError)):
        concatenate(batches[:2])
    # And cuts it again.
    rows = DataCollatorForNeatPacking(model, rows="packs", row_length=9)(
        [[{"input_ids": [5] * n} for n in lengths] for lengths in ((4, 5), (7, 2), (9,), (3, 6))]
    )
    for process in range(2):
        part = slice_tensors(rows, slice(2 * process, 2 * process + 2))
        assert part["input_ids"].shape == (2, 9)
        with pytest.raises(BoundaryError):
            model(**part)
