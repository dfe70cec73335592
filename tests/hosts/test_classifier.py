"""Sequence classifiers and reward models on packs: one answer, one label and one loss for each document."""

import copy

import datasets
import pytest
import torch
from row_runs import excess, padded, rows_of
from tiny_models import CONFIGS
from trainer_runs import arguments, quiet
from trainer_runs import excess as training_excess
from transformers import (
    AutoModelForSequenceClassification,
    JambaConfig,
    RobertaConfig,
    Trainer,
)

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    PackingCallback,
    isolate,
    pack_dataset,
    pack_sequence_classifier,
    per_label_loss,
)
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.padding.reading import read_tokens

LENGTHS = (3, 1, 4)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


def classifier(name="llama", key="neat_varlen", num_labels=2, **options):
    configs = CONFIGS | {
        "roberta": lambda: RobertaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, pad_token_id=1,
        )
    }  # fmt: skip
    config = configs[name]()
    config.num_labels = num_labels
    for option, value in options.items():
        setattr(config, option, value)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=key)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def alone(rows):
    return lambda model: [model(input_ids=row[None]).logits for row in rows]


def packed(rows, **options):
    def answer(model):
        batch = DataCollatorForNeatPacking(model, **options)([{"input_ids": row} for row in rows])
        return list(model(**batch).logits[:, None])

    return answer


@pytest.mark.parametrize(
    ("name", "key", "options", "reads"),
    [
        ("llama", "neat_varlen", {}, "last token that is not padding"),
        ("gemma3", "eager", {}, "last token that is not padding"),
        ("qwen3", "sdpa", {}, "last token that is not padding"),
        ("bert", "neat_varlen", {}, "first token"),
        ("roberta", "neat_varlen", {}, "first token"),
        ("modernbert", "sdpa", {}, "first token"),
        ("modernbert", "neat_varlen", {"classifier_pooling": "mean"}, "every token"),
    ],
)
def test_c28_every_document_is_classified_as_alone(name, key, options, reads):
    rows = rows_of(LENGTHS)
    model = classifier(name, key, **options)
    reference = classifier(name, "eager", **options)
    control = packed(rows)(model)
    assert len(control) != len(rows), "without the hooks the row is answered once"
    with pack_sequence_classifier(model) as hooks:
        assert hooks.reads == reads
        assert excess(model, packed(rows), alone(rows), reference=reference) <= 1
        in_rows = packed(rows, row_length=6)
        assert excess(model, in_rows, by_row(rows, alone), reference=reference) <= 1
        batch = padded(rows, pad=model.config.pad_token_id)
        in_padding = excess(
            model, lambda m: list(m(**batch).logits[:, None]), alone(rows), reference=reference
        )
        assert in_padding <= 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def by_row(rows, how):
    """Best-fit decreasing puts 4 and 1 tokens into the first row of 6 and 3 into the second."""
    return how([rows[2], rows[1], rows[0]])


def test_c28_pooled_tokens_are_the_ends_of_documents_and_pooling_elsewhere_fails():
    numbers = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 0, 0]])
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 0, 0, 0, 0]])

    def places(reads):
        return read_tokens(reads, numbers, ids, 0).nonzero()[:, 1].tolist()

    assert places("last token") == [2, 3, 7]
    assert places("last token that is not padding") == [2, 3, 5]
    assert places("first token") == [0, 3, 4]
    rows = rows_of(LENGTHS)
    model = classifier()
    with pack_sequence_classifier(model) as hooks:
        hooks.reads = "first token"
        assert excess(model, packed(rows), alone(rows), reference=classifier()) > 100


def test_documents_that_end_in_padding_tokens_are_read_as_transformers_reads_them_alone():
    model = classifier()
    rows = [torch.tensor(ids) for ids in ([5, 6, 0, 0], [0, 7], [0], [8, 0, 9])]
    with pack_sequence_classifier(model):
        assert excess(model, packed(rows), alone(rows), reference=classifier()) <= 1


@pytest.mark.parametrize(
    ("num_labels", "labels"),
    [
        (2, [0, 1, 1]),
        (1, [0.5, -1.0, 2.0]),
        (1, [3, 1, 4]),
        (4, [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
    ],
    ids=["integers", "rewards", "integer rewards", "several at once"],
)
def test_labels_of_documents_give_the_loss_of_the_batch(num_labels, labels):
    model, rows = classifier(num_labels=num_labels), rows_of(LENGTHS)
    reference = copy.deepcopy(model)
    documents = [{"input_ids": r, "label": y} for r, y in zip(rows, labels, strict=True)]
    with pack_sequence_classifier(model):
        batch = DataCollatorForNeatPacking(model)(documents)
        assert batch["labels"].dtype == torch.tensor(labels).dtype
        assert batch["labels"].tolist() == labels
        assert "label" not in batch
        output = model(**batch)
        output.loss.backward()
        assert per_label_loss(output, batch["labels"]).item() == pytest.approx(output.loss.item())
    together = padded(rows) | {"labels": torch.tensor(labels)}
    assert reference(**together).loss.item() == pytest.approx(output.loss.item(), rel=1e-5)


def test_several_labels_at_once_have_a_mean_over_all_of_them():
    logits, labels = torch.randn(3, 4), torch.randint(0, 2, (3, 4)).float()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert per_label_loss((logits,), labels).item() == pytest.approx(wanted.item())
    with pytest.raises(ContractError, match="one label for each document"):
        per_label_loss((logits,), labels[:2])
    with pytest.raises(ContractError, match="one label for each document"):
        per_label_loss((logits,), None)


def test_training_a_classifier_on_packs_is_training_on_the_same_documents(tmp_path):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (60,), generator=generator).tolist()
    rows = rows_of(lengths)
    labels = torch.randint(0, 2, (60,), generator=generator).tolist()
    data = [{"input_ids": r.tolist(), "label": y} for r, y in zip(rows, labels, strict=True)]
    packs = pack_dataset(datasets.Dataset.from_list(data), max_length=16)

    class Watched(Trainer):
        counts = ()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.counts = (*self.counts, int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    model = classifier().train()
    proven = PackingCallback()
    options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    with pack_sequence_classifier(model):
        trainer = Watched(
            model,
            arguments(tmp_path, max_steps=3, **options),
            train_dataset=packs,
            data_collator=DataCollatorForNeatPacking(model),
            callbacks=[proven],
            compute_loss_func=per_label_loss,
        )
        trainer.train()
    assert len(proven.proof.layers) == 2
    shared = [
        [
            (torch.tensor([list(ids)]), int(label))
            for pack in (packs[i] for i in range(4 * step, 4 * step + 4))
            for ids, label in zip(pack["input_ids"], pack["label"], strict=True)
        ]
        for step in range(3)
    ]
    assert list(trainer.counts[::2]) == [len(documents) for documents in shared]
    assert len(set(trainer.counts)) > 1, "updates hold different numbers of documents"
    alone = {dtype: trained_alone(shared, dtype) for dtype in (torch.float32, torch.float64)}
    assert training_excess(model, alone[torch.float32], alone[torch.float64], 3) <= 1
    assert training_excess(classifier(), alone[torch.float32], alone[torch.float64], 3) > 100


def trained_alone(updates, dtype):
    """Take the same updates with each document by itself."""
    model = classifier().to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, documents in enumerate(updates):
        logits = torch.cat([model(ids).logits for ids, _ in documents])
        labels = torch.tensor([label for _, label in documents])
        torch.nn.functional.cross_entropy(logits, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / len(updates))
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_metrics_of_packs_count_every_document_or_are_refused(tmp_path):
    rows = rows_of((3, 5, 2, 6, 1, 4, 7))
    documents = datasets.Dataset.from_list(
        [{"input_ids": r.tolist(), "label": i % 2} for i, r in enumerate(rows)]
    )
    model = classifier()
    with pack_sequence_classifier(model):
        for data, size in (
            (pack_dataset(documents, max_length=8), 1),
            (documents, 3),
            (pack_dataset(documents, max_length=8), 3),
        ):
            counted = []
            trainer = Trainer(
                model, arguments(tmp_path, per_device_eval_batch_size=size), eval_dataset=data,
                data_collator=DataCollatorForNeatPacking(model), callbacks=[PackingCallback()],
                compute_metrics=lambda prediction, counted=counted: counted.append(
                    (len(prediction.predictions), len(prediction.label_ids))
                ) or {},
            )  # fmt: skip
            if data is documents or size == 1:
                trainer.evaluate()
                assert counted == [(len(rows), len(rows))]
            else:
                with pytest.raises(ContractError, match="per_device_eval_batch_size=1"):
                    trainer.evaluate()


def test_what_has_no_head_a_padding_token_or_ids_is_refused_by_name():
    model = classifier(pad_token_id=None)
    with pytest.raises(ContractError, match="pad_token_id"):
        pack_sequence_classifier(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model = classifier()
    with pack_sequence_classifier(model) as hooks:
        batch = hooks.collator([{"input_ids": [5, 6]}])
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
        with pytest.raises(ContractError, match="embeddings"):
            model(**batch)
    mixing = classifier()
    mixing.score.register_forward_hook(lambda m, args, output: output + output.mean((0, 1)))
    with pytest.raises(UnsupportedModelError, match="away from"):
        pack_sequence_classifier(mixing)
    assert not mixing._forward_pre_hooks


def test_a_recurrent_classifier_is_isolated_first():
    config = JambaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4,
        use_mamba_kernels=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model, rows = model.eval(), rows_of((3, 6, 4))
    with pytest.raises(UnsupportedModelError, match="isolate"):
        pack_sequence_classifier(model)
    with isolate(model.base_model), pack_sequence_classifier(model):
        assert excess(model, packed(rows), alone(rows)) <= 1
