"""The load of experts, by which a bias without a loss balances them, is that of real tokens."""

import pytest
import torch

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.batches import random_documents
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.hooks.expert_load import count_expert_load
from hf_neat_packing.hooks.routing import routing_hooks
from hf_neat_packing.isolation import isolate

PADDED = {"pad_to_multiple_of": 64}


def loads_of(model, documents=None, **options):
    documents = random_documents(model) if documents is None else documents
    batch = DataCollatorForNeatPacking(model, **options)(documents)
    with count_expert_load(model) as load:
        model(**batch)
    return load.counts


def alone(model):
    with count_expert_load(model) as load:
        for document in random_documents(model):
            model(input_ids=torch.tensor([document["input_ids"]]))
    return load.counts


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "mixtral"])
def test_a_padding_tail_has_no_load(model_type):
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    truth = alone(model)
    documents = random_documents(model)
    assert equal(loads_of(model), truth)
    assert equal(loads_of(model, **PADDED), truth)
    rows = [documents[:3], documents[3:]]
    assert equal(loads_of(model, rows, row_length=24, rows="packs"), truth)
    assert routing_hooks(model) is None
    # The control: who counts every slot counts padding.
    batch = DataCollatorForNeatPacking(model, **PADDED)(documents)
    batch.pop("_packed_seq_ids")
    with count_expert_load(model) as load:
        model(**batch)
    assert not equal(load.counts, truth)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "kimi_linear"])
def test_regrouped_tokens_are_counted_once_each(model_type):
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    with isolate(model):
        truth = alone(model)
        assert equal(loads_of(model), truth)
        assert equal(loads_of(model, **PADDED), truth)
        assert routing_hooks(model) is not None


def test_checkpointed_layers_are_counted_once_and_a_reset_begins_anew():
    model = tiny_model("deepseek_v3", attn_implementation="neat_varlen").train()
    truth = alone(model)
    model.gradient_checkpointing_enable()
    batch = DataCollatorForNeatPacking(model, **PADDED)(random_documents(model))
    with count_expert_load(model) as load:
        for _ in range(2):
            load.reset()
            model(**batch).loss.backward()
            assert equal(load.counts, truth)


def test_a_model_without_such_experts_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*top_k_index"):
        count_expert_load(tiny_model("llama"))
