"""The example of a custom model keeps documents apart, in logits and in every gradient."""

import importlib.util
from pathlib import Path

import pytest
import torch
from contract_exactness import (
    assert_as_exact_as_alone,
    assert_same_gradients,
    documents,
    double,
    gradients,
    summed_loss,
)

from hf_neat_packing.capabilities import configure_packing_for_models, model_capabilities
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.errors import UnsupportedModelError

PATH = Path(__file__).parents[2] / "examples" / "custom_model.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("custom_model_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hybrid(example):
    torch.manual_seed(0)
    return example.TinyHybrid()


def features(docs):
    return [{"input_ids": document.tolist()} for document in docs]


def run_alone(model, docs):
    collator = DataCollatorForNeatPacking(model)
    logits = [
        model(**{k: v for k, v in collator(features([d])).items() if k != "labels"})[0][0]
        for d in docs
    ]
    loss = sum(summed_loss(x[None], d[None]) for x, d in zip(logits, docs, strict=True))
    return [x.detach() for x in logits], gradients(model, loss)


def test_the_example_declares_document_ids_and_the_bundle(hybrid):
    capabilities = model_capabilities(hybrid)
    assert capabilities.layout == "document_ids"
    assert capabilities.requires_packed_sequence_metadata is True
    batch = DataCollatorForNeatPacking(hybrid)(features(documents(3, 4, vocabulary=64)))
    assert torch.equal(batch["attention_mask"], batch["_packed_seq_ids"])
    assert batch["packed_token_indices"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("padding", [1, 8])
def test_packed_rows_equal_documents_alone(hybrid, padding):
    docs = documents(3, 7, 1, 5, vocabulary=64)
    batch = DataCollatorForNeatPacking(hybrid, pad_to_multiple_of=padding)(features(docs))
    logits, _ = hybrid(**batch)
    packed_gradients = gradients(hybrid, summed_loss(logits, batch["labels"]))
    alone, alone_gradients = run_alone(hybrid, docs)
    truth, true_gradients = run_alone(double(hybrid), docs)
    parts = logits[0, :16].split([len(document) for document in docs])
    for part, one, true in zip(parts, alone, truth, strict=True):
        assert_as_exact_as_alone(part, one, true, "logits")
    assert_same_gradients(packed_gradients, alone_gradients, true_gradients)


def test_the_dry_run_proves_the_example_and_catches_it_without_its_boundaries(example, hybrid):
    prove_isolation(hybrid, DataCollatorForNeatPacking(hybrid))

    class Joined(example.TinyHybrid):
        def recurrent_documents(self, batch, **sizes):
            one = {"attention_mask": torch.ones_like(batch["attention_mask"])}
            return super().recurrent_documents(one, **sizes)

    joined = Joined()
    with pytest.raises(UnsupportedModelError, match=r"Joined.*before attention layer.*recurrent"):
        prove_isolation(joined, DataCollatorForNeatPacking(joined))


def test_a_recurrent_model_keeps_its_bundle_when_it_is_configured(hybrid):
    configure_packing_for_models([hybrid])
    prove_isolation(hybrid, DataCollatorForNeatPacking(hybrid))


def test_the_example_learns_from_packed_rows(example, hybrid):
    data = example.make_documents()
    losses = example.train(hybrid, data, steps=15)
    assert losses[-1] < losses[0] / 2
