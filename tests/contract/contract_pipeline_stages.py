"""A model in two pipeline stages, and what one process of the pipeline test does.

Run as `python contract_pipeline_stages.py RANK FILE`: for each layout and number of microbatches, trains one step of
one stage on packed rows and exits with an error unless logits and gradients are those of the documents alone.
"""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from contract_exactness import (
    assert_as_exact_as_alone,
    assert_same_gradients,
    documents,
    double,
    gradients,
    summed_loss,
)
from torch import nn

from hf_neat_packing.capabilities import configure_packing_for_models
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.mixins import HFDispatchMixin, NativeFA4Mixin, RecurrentPackingMixin

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 64, 12
LAYOUTS = ["native", "varlen", "recurrent"]


def reference_varlen(query, key, value, cu_seqlens):
    """Causal attention of each document of a flat stream `[T, H, D]`: the callable of the kernels."""
    out = []
    for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(out)


class Layer(nn.Module):
    """One attention layer, which reads its boundaries in one of three layouts."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden, model, batch):
        rows, length, _ = hidden.shape
        flat = self.project(self.norm(hidden)).reshape(rows * length, 3, HEADS, -1)
        if self.layout == "varlen":
            mixed = reference_varlen(*flat.unbind(1), batch["cu_seq_lens_q"]).flatten(1)
            return hidden + mixed.reshape(hidden.shape)
        if self.layout == "native":
            indices, cu_seqlens = batch["packed_token_indices"], batch["cu_seqlens"]
            assert indices.ndim == 1, "the entry hook flattens the bundle once"
        else:
            indices, cu_seqlens, _ = model.recurrent_documents(
                batch, batch_size=rows, sequence_length=length
            )
        mixed = reference_varlen(*flat[indices].unbind(1), cu_seqlens).flatten(1)
        out = hidden.new_zeros(rows * length, WIDTH).index_copy(0, indices, mixed)
        return hidden + out.reshape(hidden.shape)


class Stage(nn.Module):
    """Half of the model: embeddings and a layer, or a layer and the head."""

    def __init__(self, layout, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 else None
        self.layer = Layer(layout)
        self.head = nn.Linear(WIDTH, VOCABULARY) if rank == 1 else None

    def forward(self, hidden, **batch):
        hidden = self.tokens(hidden) if self.tokens is not None else hidden
        hidden = self.layer(hidden, self, batch)
        return self.head(hidden) if self.head is not None else hidden


class NativeStage(NativeFA4Mixin, Stage):
    backend = SimpleNamespace(attn="fa4")


class VarlenStage(HFDispatchMixin, Stage):
    config = SimpleNamespace(_attn_implementation="flash_attention_2")


class RecurrentStage(RecurrentPackingMixin, Stage):
    backend = SimpleNamespace(attn="te")
    packed_mask_type = "document_ids"


CLASSES = {"native": NativeStage, "varlen": VarlenStage, "recurrent": RecurrentStage}


def make(layout):
    """Both stages, and a batch of two rows of documents with padding in one of them."""
    stages = [CLASSES[layout](layout, rank) for rank in range(2)]
    docs = documents(3, 7, 5, 4, 3, vocabulary=VOCABULARY)
    contract = configure_packing_for_models(stages)
    collator = DataCollatorForNeatPacking(contract=contract, rows="packs", row_length=LENGTH)
    batch = collator([[{"input_ids": d.tolist()} for d in docs[i:j]] for i, j in ((0, 2), (2, 5))])
    return stages, docs, batch


def run_alone(stages, docs):
    """Logits of each document alone and the gradients of both stages."""
    both = nn.ModuleList(stages)
    logits = []
    for document in docs:
        one = torch.ones(1, len(document), dtype=torch.long)
        boundaries = DataCollatorForNeatPacking(contract=configure_packing_for_models(stages))(
            [{"input_ids": document.tolist()}]
        )
        kwargs = {name: boundaries[name] for name in boundary_names(boundaries)}
        assert torch.equal(kwargs["_packed_seq_ids"], one)
        logits.append(stages[1](stages[0](document[None], **kwargs), **kwargs)[0])
    loss = sum(summed_loss(x[None], d[None]) for x, d in zip(logits, docs, strict=True))
    return [x.detach() for x in logits], gradients(both, loss)


def boundary_names(batch):
    return [name for name in batch if name not in ("input_ids", "labels", "position_ids")]


def check_logits(logits, batch, docs, alone, truth):
    parts = [
        logits[row][batch["_packed_seq_ids"][row] == number]
        for row in range(logits.shape[0])
        for number in range(1, int(batch["_packed_seq_ids"][row].max()) + 1)
    ]
    assert [len(part) for part in parts] == [len(document) for document in docs]
    for part, one, true in zip(parts, alone, truth, strict=True):
        assert_as_exact_as_alone(part, one, true, "logits")


def train_one_step(rank, layout, microbatches):
    """One step of a schedule of torch, compared with the documents alone."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stages, docs, batch = make(layout)
    rows = 2 // microbatches
    hidden = torch.zeros(rows, LENGTH, WIDTH, requires_grad=True)
    example = torch.zeros(rows, LENGTH, dtype=torch.long) if rank == 0 else hidden
    output = hidden if rank == 0 else torch.zeros(rows, LENGTH, VOCABULARY, requires_grad=True)
    stage = PipelineStage(
        stages[rank], rank, 2, torch.device("cpu"), input_args=(example,), output_args=(output,)
    )
    schedule = ScheduleGPipe(
        stage, n_microbatches=microbatches, loss_fn=summed_loss, scale_grads=False
    )
    kwargs = {name: batch[name] for name in boundary_names(batch)}
    if rank == 0:
        schedule.step(batch["input_ids"], **kwargs)
    else:
        logits = schedule.step(target=batch["labels"], **kwargs)
    found = {n: p.grad.clone() for n, p in stages[rank].named_parameters() if p.grad is not None}
    alone, alone_gradients = run_alone(stages, docs)
    truth, true_gradients = run_alone([double(one) for one in stages], docs)

    def mine(values):
        prefix = f"{rank}."
        return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}

    assert_same_gradients(found, mine(alone_gradients), mine(true_gradients))
    if rank == 1:
        check_logits(logits, batch, docs, alone, truth)


def main(rank, file):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for layout in LAYOUTS:
        for microbatches in (1, 2):
            train_one_step(rank, layout, microbatches)
            print("exact:", layout, microbatches, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
