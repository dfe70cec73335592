"""Losses per document and evaluation: the same numbers whatever shares a row, a batch or an update."""

import pytest
import torch
from tiny_models import tiny_model
from trainer_runs import (
    Padded,
    arguments,
    documents,
    excess,
    packs,
    quiet,
    train,
)
from transformers import Trainer

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    PackedEvaluation,
    PackingCallback,
    per_document_loss,
)
from hf_neat_packing import loss_labels as marks
from hf_neat_packing.errors import ContractError, UnsupportedTransformersError

STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


def one_by_one(features):
    """A batch of one document, as a Trainer without packing has it."""
    (document,) = features
    return {name: torch.tensor([document[name]]) for name in ("input_ids", "labels")}


def test_c24_worked_example_per_token_and_per_document():
    # Document A has six targets of loss 1, document B one target of loss 3.
    labels = torch.tensor([[-100, 1, 1, 1, 1, 1, 1, -100, 2]])
    numbers = torch.tensor([[1] * 7 + [2] * 2])
    wanted = torch.tensor([1.0] * 6 + [9.0, 3.0])
    logits = torch.zeros(1, 9, 3)
    for place, loss in enumerate(wanted):
        # Two other classes at 0: exp(-loss) is the target's share.
        share = torch.exp(-loss)
        logits[0, place, labels[0, place + 1].clamp(min=0)] = torch.log(2 * share / (1 - share))
    marked = marks.mark_documents(labels, numbers)
    assert marked["shift_labels"].ne(-100).sum() == 2
    assert per_document_loss({"logits": logits}, marked["labels"]).item() == pytest.approx(2.0)
    half = per_document_loss((logits,), marked["labels"], num_items_in_batch=4)
    assert half.item() == pytest.approx(1.0), "the sum over documents of an update, divided by them"
    evaluated = PackedEvaluation().sums(logits, labels).sum(0)
    assert (evaluated[1] / evaluated[0]).item() == pytest.approx(9 / 7)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_per_document_loss_is_training_on_documents_one_by_one(tmp_path, accumulation):
    """Both runs take the same documents in every update: those of `2 * accumulation` packs."""
    model = tiny_model("llama")
    data, group = packs(80), 2 * accumulation
    watch, counts = train(
        model, data, DataCollatorForNeatPacking(model, loss_per="document"), tmp_path,
        trainer={"compute_loss_func": per_document_loss}, gradient_accumulation_steps=accumulation,
        callbacks=[PackingCallback()], max_steps=STEPS, train_sampling_strategy="sequential",
    )  # fmt: skip
    results = {}
    for dtype in (torch.float64, torch.float32):
        alone = tiny_model("llama", "sdpa", dtype).train()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.0)
        losses = []
        for step in range(STEPS):
            shared = [documents_of(data[i]) for i in range(step * group, (step + 1) * group)]
            trained = [d for pack in shared for d in pack if any(x >= 0 for x in d["labels"][1:])]
            per_document = [alone(**one_by_one([document])).loss for document in trained]
            loss = torch.stack(per_document).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            for group_of in optimizer.param_groups:
                group_of["lr"] = 1e-3 * (1 - step / STEPS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert counts[step * accumulation] == len(trained)
        results[dtype] = (alone, losses)
    assert watch.losses == pytest.approx(results[torch.float64][1], rel=1e-5)
    assert excess(model, results[torch.float32][0], results[torch.float64][0], STEPS) <= 1
    per_token = tiny_model("llama")
    train(
        per_token, data, DataCollatorForNeatPacking(per_token), tmp_path, max_steps=STEPS,
        gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
    )  # fmt: skip
    assert excess(per_token, results[torch.float32][0], results[torch.float64][0], STEPS) > 100


def documents_of(pack):
    pairs = zip(pack["input_ids"], pack["labels"], strict=True)
    return [{"input_ids": list(ids), "labels": list(labels)} for ids, labels in pairs]


def test_marked_labels_fail_in_any_other_loss(tmp_path):
    model = tiny_model("llama")
    batch = DataCollatorForNeatPacking(model, loss_per="document")([packs()[0]])
    with pytest.raises(ValueError, match="batch_size"):
        model(**batch)
    with pytest.raises(IndexError, match="out of bounds"):
        model(input_ids=batch["input_ids"], labels=batch["labels"])
    with pytest.raises((IndexError, RuntimeError)):
        train(
            model, packs(), DataCollatorForNeatPacking(model, loss_per="document"), tmp_path,
            label_smoothing_factor=0.1,
        )  # fmt: skip


def test_per_document_loss_refuses_labels_that_say_nothing_of_documents(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ContractError, match='loss_per="document"'):
        train(
            model, packs(), DataCollatorForNeatPacking(model), tmp_path,
            trainer={"compute_loss_func": per_document_loss},
        )  # fmt: skip


def test_documents_cannot_be_marked_everywhere(monkeypatch):
    with pytest.raises(ContractError, match="ForMaskedLM"):
        DataCollatorForNeatPacking(tiny_model("bert"), loss_per="document")
    with pytest.raises(ContractError, match="'token' and 'document'"):
        DataCollatorForNeatPacking(loss_per="row")
    collator = DataCollatorForNeatPacking(loss_per="document")
    with pytest.raises(ContractError, match="one label per token"):
        collator([{"input_ids": [5, 6], "labels": 1}])
    monkeypatch.setattr(marks, "trainer_counts_shift_labels", lambda: False)
    with pytest.raises(UnsupportedTransformersError, match=">= 5"):
        DataCollatorForNeatPacking(loss_per="document")


def padded_documents(features):
    return Padded()([{name: [f[name]] for name in ("input_ids", "labels")} for f in features])


def evaluate(model, data, collator, folder, batch_size):
    evaluation = PackedEvaluation()
    host = Trainer(
        model=model, args=arguments(folder, per_device_eval_batch_size=batch_size), data_collator=collator,
        eval_dataset=data, preprocess_logits_for_metrics=evaluation.sums, compute_metrics=evaluation.means,
    )  # fmt: skip
    return host.evaluate()


def test_evaluation_is_the_mean_over_targets_packed_padded_and_in_any_batch(tmp_path):
    model = tiny_model("llama")
    total, targets, right = 0.0, 0, 0
    with torch.no_grad():
        for document in documents():
            batch = one_by_one([document])
            logits = model(batch["input_ids"]).logits[0, :-1].double()
            wanted = batch["labels"][0, 1:]
            kept = wanted >= 0
            chosen = logits.log_softmax(-1)[kept].gather(1, wanted[kept][:, None])
            total, targets = total - float(chosen.sum()), targets + int(kept.sum())
            right += int((logits.argmax(-1) == wanted)[kept].sum())
    collator = DataCollatorForNeatPacking(model)
    found = [evaluate(model, packs(), collator, tmp_path, size) for size in (1, 3)]
    found.append(evaluate(model, documents(), padded_documents, tmp_path, 6))
    found.append(evaluate(model, documents(), collator, tmp_path, 8))
    marked = DataCollatorForNeatPacking(model, loss_per="document")
    batch = marked([packs()[0]])
    with torch.no_grad():
        sums = PackedEvaluation().sums(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    assert sums[0, 0] == sum(x >= 0 for d in documents_of(packs()[0]) for x in d["labels"][1:])
    for metrics in found:
        assert metrics["eval_token_loss"] == pytest.approx(total / targets, rel=1e-5)
        assert metrics["eval_token_accuracy"] == pytest.approx(right / targets)
        assert metrics["eval_token_entropy"] == pytest.approx(
            found[0]["eval_token_entropy"], rel=1e-5
        )
    losses = {round(metrics["eval_loss"], 4) for metrics in found}
    assert len(losses) > 1, "the Trainer's own number depends on what shares a batch"


def test_c27_without_a_target_the_numbers_are_zero():
    labels = torch.full((1, 4), -100)
    sums = PackedEvaluation().sums(torch.randn(1, 4, 5), labels)
    prediction = type("Prediction", (), {"predictions": sums.numpy()})
    assert PackedEvaluation().means(prediction) == {
        "token_loss": 0.0, "token_accuracy": 0.0, "token_entropy": 0.0
    }  # fmt: skip


def test_c27_metrics_take_the_targets_of_the_loss_and_no_others():
    # Documents of 3 and 2 tokens and a tail of 3; right at every valid target, wrong elsewhere.
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100, -100, -100]])
    logits = torch.zeros(1, 8, 10)
    for place, target in ((0, 5), (1, 6), (3, 7)):
        logits[0, place, target] = 9.0
    for place in (2, 4, 5, 6, 7):
        logits[0, place, 1] = 9.0
    sums = PackedEvaluation().sums(logits, labels)[0]
    assert sums[0] == 3
    assert sums[2] == 3
    one = torch.distributions.Categorical(logits=logits[0, 0]).entropy()
    assert sums[3].item() == pytest.approx(3 * one.item(), rel=1e-5)
