"""Two ranks of which the second fails: `python distributed_failure.py FOLDER`.

It meets a document that its policy refuses, inside a worker of its loader. The first rank is then in a
collective that nobody joins, with an hour of patience.
"""

import datetime
import sys

import torch
import torch.distributed as dist
from distributed_processes import join_group
from torch.utils.data import DataLoader

from hf_neat_packing import DataCollatorForNeatPacking, pack_stream


def main():
    join_group(sys.argv[1], timeout=datetime.timedelta(hours=1))
    rank = dist.get_rank()
    documents = [{"input_ids": [1] * n} for n in (5, 6, 7, 4, 6, 99 if rank == 1 else 7, 3)]
    loader = DataLoader(
        pack_stream(documents, max_length=8, buffer=1),
        batch_size=1,
        num_workers=1,
        collate_fn=DataCollatorForNeatPacking(),
    )
    for step, batch in enumerate(loader):
        dist.all_reduce(batch["input_ids"].sum())
        print(f"rank {rank}, step {step}", flush=True)
    torch.save({}, f"{sys.argv[1]}/finished-{rank}")


if __name__ == "__main__":
    main()
