"""Start two real processes that train together, and never wait for one whose peer has died."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent


def environment(folder):
    """Variables of a process: offline, one thread, this repository and its tests on the path."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "hosts")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
    }


def start_ranks(script, folder, *words, size=2):
    """Start one process a rank, each with the variables that torchrun would set; they meet in a file."""
    processes = []
    for rank in range(size):
        variables = environment(folder) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        }
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, str(TESTS / "hosts" / script), str(folder), *words]
            processes.append(
                subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
            )
    return processes


def join_group(folder, name="group", **options):
    """Meet the other ranks in a file: a port that is free now may be taken when it is needed."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        **options,
    )


def wait(processes, *, seconds, all_must_succeed=True):
    """Wait for all, or until one has failed or time is up, and leave none behind.

    Returns:
        The exit code of each; None for one that had to be killed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or (all_must_succeed and any(codes)):
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes


def run_ranks(script, folder, *words, seconds=300):
    """Run a script in two processes and return what each rank has recorded, by name."""
    codes = wait(start_ranks(script, folder, *words), seconds=seconds)
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(len(codes))]
    assert codes == [0] * len(codes), "\n\n".join([str(codes), *(log[-4000:] for log in logs)])
    return [read_records(folder, rank) for rank in range(len(codes))]


def record(folder, rank, name, **values):
    """Append what one check has found, for the test that reads it."""
    with (Path(folder) / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"name": name, **values}) + "\n")


def read_records(folder, rank):
    lines = (Path(folder) / f"rank{rank}.jsonl").read_text().splitlines()
    return {found.pop("name"): found for found in map(json.loads, lines)}
