"""Encoders on packs: masked language modelling and token classification, every document as alone."""

import pickle

import pytest
import torch
from row_runs import excess, padded, rows_of
from tiny_models import CONFIGS, tiny_model
from trainer_runs import arguments, quiet
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    RobertaConfig,
    Trainer,
)

from hf_neat_packing import DataCollatorForNeatPacking, PackingCallback, isolate
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.errors import ColumnError, ContractError

LENGTHS = (4, 1, 9, 5)
KINDS = {"masked": AutoModelForMaskedLM, "tokens": AutoModelForTokenClassification}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


def encoder(name, key, kind="masked", **options):
    configs = CONFIGS | {
        "roberta": lambda: RobertaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=40, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        )
    }  # fmt: skip
    config = configs[name]()
    for option, value in {"num_labels": 3, **options}.items():
        setattr(config, option, value)
    torch.manual_seed(0)
    model = KINDS[kind].from_config(config, attn_implementation=key)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def alone(rows):
    return lambda model: [model(input_ids=row[None]).logits[0] for row in rows]


def packed(rows, change=lambda batch: batch, **options):
    def answer(model):
        collator = DataCollatorForNeatPacking(model, **options)
        batch = change(collator([{"input_ids": row} for row in rows]))
        return list(model(**batch).logits[0, : sum(map(len, rows))].split([len(r) for r in rows]))

    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert", "neat_varlen"), ("bert", "sdpa"), ("roberta", "neat_varlen"), ("roberta", "eager"),
        ("modernbert", "neat_varlen"), ("modernbert", "sdpa"),
    ],
)  # fmt: skip
def test_c12_documents_of_an_encoder_are_as_alone_in_both_directions(name, key, kind):
    model, rows = encoder(name, key, kind), rows_of(LENGTHS)
    reference = encoder(name, "eager", kind)
    assert excess(model, packed(rows, pad_to_multiple_of=8), alone(rows), reference=reference) <= 1

    def forget(batch):
        """Give the ids alone: what a packed row is to a model that hears of no boundaries."""
        return {"input_ids": batch["input_ids"]}

    assert excess(model, packed(rows, forget), alone(rows), reference=reference) > 100
    batch = DataCollatorForNeatPacking(model)([{"input_ids": row} for row in rows])
    with torch.no_grad():
        before = model(**batch).logits
        changed = dict(batch, input_ids=batch["input_ids"].clone())
        changed["input_ids"][0, :4] = 3 + (changed["input_ids"][0, :4] + 40) % 90
        after = model(**changed).logits
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, 0], after[:, 0])


def test_c16_positions_of_roberta_begin_after_its_padding_and_end_where_its_table_ends():
    model = encoder("roberta", "neat_varlen")
    batch = DataCollatorForNeatPacking(model)([{"input_ids": r} for r in rows_of((3, 2))])
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    rows = rows_of(LENGTHS)

    def from_zero(batch):
        return dict(batch, position_ids=batch["position_ids"] - 2)

    assert excess(model, packed(rows, from_zero), alone(rows), reference=model) > 100
    model, longest = encoder("roberta", "neat_varlen", max_position_embeddings=16), rows_of((14,))
    assert excess(model, packed(longest), alone(longest)) <= 1


def test_modernbert_keeps_its_window_inside_documents():
    rows = rows_of((9, 9))
    model = encoder("modernbert", "neat_varlen")
    everywhere = encoder("modernbert", "eager", local_attention=64)
    reference = encoder("modernbert", "eager")
    assert excess(model, packed(rows), alone(rows), reference=reference) <= 1
    assert excess(model, packed(rows), alone(rows), reference=everywhere) > 100, "there is a window"


@pytest.mark.parametrize("kind", KINDS)
def test_losses_keep_every_label_and_divide_by_the_unpacked_count(kind, tmp_path):
    model, rows = encoder("bert", "neat_varlen", kind), rows_of(LENGTHS)
    generator = torch.Generator().manual_seed(2)
    labels = [torch.randint(0, 3, (len(r),), generator=generator) for r in rows]
    labels[2][3:6] = -100
    documents = [
        {"input_ids": r, "labels": y, "token_type_ids": torch.arange(len(r)) % 2}
        for r, y in zip(rows, labels, strict=True)
    ]
    batch = DataCollatorForNeatPacking(model, pad_to_multiple_of=8)(documents)
    assert int((batch["labels"] != -100).sum()) == sum(LENGTHS) - 3
    together = padded(rows)
    real = together["attention_mask"].bool()
    together["labels"] = torch.full(real.shape, -100).masked_scatter(real, torch.cat(labels))
    kinds = torch.cat([d["token_type_ids"] for d in documents])
    together["token_type_ids"] = torch.zeros_like(real, dtype=torch.int64).masked_scatter(
        real, kinds
    )
    reference = encoder("bert", "eager", kind)
    assert model(**batch).loss.item() == pytest.approx(reference(**together).loss.item(), rel=1e-5)

    class Watched(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.count = int(num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    proven = PackingCallback()
    trainer = Watched(
        model, arguments(tmp_path, max_steps=1, per_device_train_batch_size=4), train_dataset=documents,
        data_collator=DataCollatorForNeatPacking(model), callbacks=[proven],
    )  # fmt: skip
    trainer.train()
    assert trainer.count == sum(LENGTHS) - 3
    assert proven.proof.distance_from_alone < 1e-3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(92))]
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(words))
    return (
        BertTokenizer(vocab=str(path))
        if "vocab" in BertTokenizer.__init__.__annotations__
        else BertTokenizer(str(path))
    )


def masked_documents(tokenizer, column):
    texts = ["w1 w2 w3 w4 w5 w6", "w7", "w8 w9 w10 w11", "w12 w13"]
    wanted = {"return_special_tokens_mask": column, "return_attention_mask": False}
    return [dict(tokenizer(text, **wanted)) for text in texts]


@pytest.mark.parametrize("column", [False, True], ids=["found by id", "given as a column"])
def test_tokens_are_masked_by_transformers_own_collator_and_never_special_ones_or_the_tail(
    tokenizer, column
):
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    model = encoder("bert", "neat_varlen")
    collator = DataCollatorForNeatPacking(
        model, mask_tokens=masking.torch_mask_tokens, pad_to_multiple_of=32,
        pad_token_id=tokenizer.convert_tokens_to_ids("w50"),
    )  # fmt: skip
    collator = pickle.loads(pickle.dumps(collator))
    documents = masked_documents(tokenizer, column)
    torch.manual_seed(0)
    batch = collator(documents)
    row = torch.cat([torch.tensor(d["input_ids"]) for d in documents])
    special = torch.isin(row, torch.tensor(tokenizer.all_special_ids))
    labels = batch["labels"][0]
    assert torch.equal(labels[: len(row)], row.masked_fill(special, -100))
    assert (labels[len(row) :] == -100).all()
    assert (batch["input_ids"][0, len(row) :] == tokenizer.convert_tokens_to_ids("w50")).all()
    assert torch.equal(batch["input_ids"][0, : len(row)][special], row[special])
    assert (batch["input_ids"][0, : len(row)] == tokenizer.mask_token_id).sum() > 0
    lengths = [len(d["input_ids"]) for d in documents]
    assert torch.equal(batch["_packed_seq_ids"], lengths_to_document_map([lengths], row_length=32))
    assert "special_tokens_mask" not in batch
    assert torch.isfinite(model(**batch).loss)


def test_masked_language_modelling_in_the_trainer_divides_by_the_masked_tokens(tokenizer, tmp_path):
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=4)
    model = encoder("modernbert", "neat_varlen")
    collator = DataCollatorForNeatPacking(model, mask_tokens=masking.torch_mask_tokens)
    counts = []

    class Watched(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            counts.append((int(num_items_in_batch), int((inputs["labels"] != -100).sum())))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    data = masked_documents(tokenizer, True) * 4
    Watched(
        model, arguments(tmp_path, max_steps=3, remove_unused_columns=False), train_dataset=data,
        data_collator=collator, callbacks=[PackingCallback()],
    ).train()  # fmt: skip
    assert len(counts) == 3
    assert all(divided == masked > 0 for divided, masked in counts)


def test_masking_is_refused_where_a_loss_would_read_it_otherwise(tokenizer):
    masking = DataCollatorForLanguageModeling(tokenizer).torch_mask_tokens
    with pytest.raises(ContractError, match="next token"):
        DataCollatorForNeatPacking(tiny_model("llama"), mask_tokens=masking)
    collator = DataCollatorForNeatPacking(encoder("bert", "sdpa"), mask_tokens=masking)
    with pytest.raises(ColumnError, match="labels"):
        collator([{"input_ids": [5, 6], "labels": [5, 6]}])


def test_c16_documents_longer_than_the_table_of_positions_are_refused():
    collator = DataCollatorForNeatPacking(encoder("roberta", "sdpa", max_position_embeddings=16))
    with pytest.raises(ColumnError) as error:
        collator([{"input_ids": rows_of((15,))[0]}])
    for words in ("15 tokens", "max_position_embeddings=16", "to 14 tokens"):
        assert words in str(error.value)


def test_isolate_has_nothing_to_repair_in_these_encoders():
    for name in ("bert", "roberta", "modernbert"):
        with isolate(encoder(name, "neat_varlen")) as report:
            assert not report.applied
            assert not report.unpacked
