"""Two ranks of which one fails: `python distributed_failure.py FOLDER raise|hang SECONDS`.

The second rank meets a document that its policy refuses, inside a worker of its loader, or stops
answering. The first one is then in a collective that nobody joins.
"""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hf_neat_packing import DataCollatorForNeatPacking, pack_stream


def main(how, seconds):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    rank = int(os.environ["RANK"])
    longest = 99 if rank == 1 and how == "raise" else 7
    documents = [{"input_ids": [1] * n} for n in (5, 6, 7, 4, 6, longest, 3)]
    loader = DataLoader(
        pack_stream(documents, max_length=8, buffer=1),
        batch_size=1,
        num_workers=1,
        collate_fn=DataCollatorForNeatPacking(),
    )
    for step, batch in enumerate(loader):
        if how == "hang" and rank == 1 and step == 1:
            time.sleep(3600)
        dist.all_reduce(batch["input_ids"].sum())
        print(f"rank {rank}, step {step}", flush=True)
    torch.save({}, f"{sys.argv[1]}/finished-{rank}")


if __name__ == "__main__":
    main(sys.argv[2], float(sys.argv[3]))
