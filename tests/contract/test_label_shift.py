"""The first label of a document is kept where the loss reads it, and taken away where it would cross documents."""

import pytest
import torch
from contract_exactness import tiny_llama
from test_contract_callback import trainer_for

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.batches import random_documents
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.dry_run import prove_isolation, require_label_rule
from hf_neat_packing.errors import ContractError
from hf_neat_packing.isolation import isolate
from hf_neat_packing.label_shift import declared_shift, measured_shift, shift_of_losses

UNSHIFTED = ["bart", "marian", "trocr", "xlm", "xlnet", "prophetnet"]
NO_LOSS_OF_TOKENS = ["git", "musicgen"]


def document(model):
    return {"input_ids": torch.tensor([random_documents(model, (6, 6))[0]["input_ids"]])}


@pytest.mark.parametrize("model_type", UNSHIFTED)
def test_a_loss_that_does_not_shift_is_found_though_it_is_declared_otherwise(model_type):
    model = tiny_model(model_type)
    assert declared_shift(model)
    assert measured_shift(model, document(model)) is False


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "mamba2", "bert"])
def test_a_causal_loss_is_found_to_shift(model_type):
    model = tiny_model(model_type)
    assert measured_shift(model, document(model)) is True


@pytest.mark.parametrize("model_type", NO_LOSS_OF_TOKENS)
def test_what_cannot_be_measured_is_not_guessed(model_type):
    model = tiny_model(model_type)
    assert measured_shift(model, document(model)) is None


def test_a_loss_that_reads_no_label_says_nothing():
    nothing, something = torch.tensor(float("nan")), torch.tensor(2.0)
    assert shift_of_losses(nothing, something) is True
    assert shift_of_losses(something, something) is False
    assert shift_of_losses(torch.tensor(0.0), something) is True
    assert shift_of_losses(something, nothing) is None
    assert shift_of_losses(None, None) is None


def test_the_collator_follows_what_isolate_measured():
    model = tiny_model("bart", attn_implementation="neat_varlen")
    documents = [
        {"input_ids": [5, 6, 7], "labels": [6, 7, 2]},
        {"input_ids": [8, 9], "labels": [9, 2]},
    ]
    # The declared rule loses a label of each document.
    lost = DataCollatorForNeatPacking(model)(documents)["labels"]
    assert lost.tolist() == [[-100, 7, 2, -100, 2]]
    with isolate(model) as report:
        assert report.shifts_labels is False
        assert any("own label" in note for note in report.notes)
        collator = DataCollatorForNeatPacking(model)
        batch = collator(documents)
        assert batch["labels"].tolist() == [[6, 7, 2, 9, 2]]
        loss = model(**batch).loss
        alone = [
            model(input_ids=torch.tensor([d["input_ids"]]), labels=torch.tensor([d["labels"]])).loss
            for d in documents
        ]
        torch.testing.assert_close(loss, (3 * alone[0] + 2 * alone[1]) / 5)
        # Labels that ask for the token itself are nobody's wish.
        assert "labels" not in collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])


def test_training_does_not_begin_with_the_wrong_rule(tmp_path):
    model = tiny_model("whisper", attn_implementation="sdpa")
    trainer, _ = trainer_for(model, tmp_path)
    with pytest.raises(ContractError, match=r"WhisperForCausalLM.*own label.*shifted_labels=False"):
        trainer.train()
    trainer, callback = trainer_for(
        model,
        tmp_path,
        collator=DataCollatorForNeatPacking(model, shifted_labels=False),
        data=[{"input_ids": [5, 6, 7], "labels": [6, 7, 2]}] * 8,
    )
    trainer.train()
    assert callback.proof.shifts_labels is False


def test_a_label_that_would_cross_documents_is_refused():
    model = tiny_llama("neat_varlen")
    collator = DataCollatorForNeatPacking(model)
    proof = prove_isolation(model, collator)
    assert proof.shifts_labels is True
    require_label_rule(model, collator, True)
    collator.shifts_labels = False
    with pytest.raises(ContractError, match="document before it would learn"):
        require_label_rule(model, collator, True)
    # Who says it by name is believed: a loss of one's own may stand outside of the model.
    require_label_rule(model, DataCollatorForNeatPacking(model, shifted_labels=False), True)


def test_a_model_without_a_loss_needs_the_rule_by_name():
    model = tiny_llama("neat_varlen").model
    collator = DataCollatorForNeatPacking(model)
    proof = prove_isolation(model, collator)
    with pytest.raises(ContractError, match=r"LlamaModel.*shifted_labels=True"):
        require_label_rule(model, collator, proof.shifts_labels)
    collator = DataCollatorForNeatPacking(model, shifted_labels=True)
    require_label_rule(model, collator, proof.shifts_labels)
