"""Declarations, keys, hooks and the dry run through the wrappers that trainers put around a model."""

import pytest
import torch
import torch.distributed as dist
from contract_exactness import tiny_llama
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_neat_packing.capabilities import configure_packing_for_models, model_capabilities
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.hooks.metadata import entry_hook, rebuild_varlen_kwargs_at_model_entry
from hf_neat_packing.mixins import NativeFA4Mixin, RecurrentPackingMixin
from hf_neat_packing.wrappers import unwrap

FEATURES = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "fully_shard": sharded,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_read_configured_and_proven_like_the_bare_one(name):
    torch._dynamo.reset()
    bare = tiny_llama("neat_varlen").eval()
    batch = DataCollatorForNeatPacking(bare)(FEATURES)
    expected = bare(**batch).logits
    wrapped = WRAPPERS[name](bare)
    assert unwrap(wrapped) is bare
    assert model_capabilities(wrapped).layout == "varlen"
    configure_packing_for_models([wrapped])
    assert entry_hook(bare).hook is rebuild_varlen_kwargs_at_model_entry
    assert len(bare._forward_pre_hooks) == (2 if name == "fully_shard" else 1)

    proof = prove_isolation(wrapped, DataCollatorForNeatPacking(wrapped))
    assert len(proof.layers) == 2
    if "compiled" in name:
        return  # A compiled forward takes half a minute; the last test here runs one.
    # The hook runs inside the wrapper: offsets of other tokens are made right.
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([0, 7], dtype=torch.int32)
    assert torch.equal(wrapped(**batch).logits, expected)


@pytest.mark.parametrize("name", ["ddp", "compiled", "compiled ddp", "checkpointed"])
def test_declarations_of_mixins_are_read_inside_wrappers(name):
    class Declares(RecurrentPackingMixin, NativeFA4Mixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, **kwargs):
            return self.layer(x)

    model = Declares()
    wrapped = WRAPPERS[name](model)
    model.backend = type("Backend", (), {"attn": "fa4"})()
    capabilities = model_capabilities(wrapped)
    assert capabilities.uses_native_fa4
    assert capabilities.requires_packed_sequence_metadata


def test_a_compiled_model_keeps_nothing_of_the_dry_run():
    torch._dynamo.reset()
    model = tiny_llama("neat_varlen").eval()
    compiled = torch.compile(model, backend="eager")
    configure_packing_for_models([model])
    collator = DataCollatorForNeatPacking(model)
    batch = collator(FEATURES)
    expected = model(**batch).logits
    first = prove_isolation(compiled, collator)
    assert torch.equal(compiled(**batch).logits, expected)
    assert prove_isolation(compiled, collator) == first
    assert not any(module._forward_hooks for module in model.modules())
    torch._dynamo.reset()
