"""What two ranks read: the same plan of a data set, or each its own shards of a stream."""

import datasets
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from distributed_processes import record
from distributed_reference import OneProcess, optimizer_of, packs, samplers, weights_of
from tiny_models import tiny_model
from torch.nn.parallel import DistributedDataParallel

from hf_neat_packing import DataCollatorForNeatPacking, pack_stream

LENGTHS = [12, 7, 20, 3, 19, 26, 25, 21, 8, 14, 2, 6, 28, 20, 24, 23]
SHARDS = 4
TARGETS = 60


def documents():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def stream_of(rank):
    """Documents in four shards, of which each rank reads two, packed as they come."""
    stored = datasets.Dataset.from_dict({"input_ids": documents()})
    source = split_dataset_by_node(stored.to_iterable_dataset(SHARDS), rank=rank, world_size=2)
    return pack_stream(source, max_length=32, buffer=4)


def check_plans(folder):
    """Every rank plans by itself, without a word to the others."""
    packed = packs()
    own = [[int(pack) for pack in batch] for batch in samplers(packed, 2)[dist.get_rank()]]
    everyone = [None, None]
    dist.all_gather_object(everyone, (packed.plan.indices.tolist(), own))
    record(
        folder,
        dist.get_rank(),
        "plans",
        same_plan=everyone[0][0] == everyone[1][0],
        packs=len(packed),
        given=[batches for _, batches in everyone],
    )


def train_on_streams(model, *, boundaries=True):
    """Train with `join`, by which a rank whose stream has ended answers for the others' steps."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(model)
    collator, optimizer = DataCollatorForNeatPacking(model), optimizer_of(model)
    steps = 0
    with wrapped.join():
        for pack in stream_of(rank):
            batch = collator([pack])
            if not boundaries:
                batch = {name: batch[name] for name in ("input_ids", "labels")}
            loss = wrapped(**batch, num_items_in_batch=TARGETS, use_cache=False).loss
            (loss * 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return weights_of(model), steps


def check_streams(folder):
    """Streams of two ranks end at different steps; weights are those of ONE process all the same."""
    own = [list(stream_of(rank)) for rank in range(2)]
    assert len({len(packs) for packs in own}) == 2, "one stream ends before the other"
    together = [
        [
            torch.tensor(ids)
            for packs in own
            if step < len(packs)
            for ids in packs[step]["input_ids"]
        ]
        for step in range(max(map(len, own)))
    ]
    one = OneProcess(tiny_model("llama", "sdpa"), together, targets=TARGETS)
    weights, steps = train_on_streams(tiny_model("llama"))
    control, _ = train_on_streams(tiny_model("llama"), boundaries=False)
    read = sorted(ids for pack in own[dist.get_rank()] for ids in pack["input_ids"])
    record(
        folder,
        dist.get_rank(),
        "streams",
        excess=one.excess(weights),
        control=one.excess(control),
        steps=steps,
        documents=read,
    )
