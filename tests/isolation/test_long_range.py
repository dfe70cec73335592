"""Couplings that only long documents or rows show: scaled rotary tables, temperatures."""

import pytest
import torch
from isolation.mixing_models import documents, values
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.dry_run import require_known_rotary_limit
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.isolation import isolate, isolation_of

LENGTHS = [7, 1, 12, 5, 9]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
}


def scaled(config_class, rope_type, **options):
    parameters = dict(ROPE[rope_type], rope_type=rope_type, rope_theta=1000.0)
    longest = 8 if rope_type == "dynamic" else 32
    config = config_class(
        **SIZES, rope_parameters=parameters, max_position_embeddings=longest, **options
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="neat_varlen")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def fresh(build, docs):
    """Each document by a model that has seen no other: a dynamic table remembers the longest one."""
    with torch.no_grad():
        return [values(build()(input_ids=ids[None], use_cache=False))[0] for ids in docs]


def errors(model, docs, truth, **options):
    # From an isolated model; else without one, as its collator refuses what is not exact.
    collate = DataCollatorForNeatPacking(model if isolation_of(model) else None, **options)
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels")
    with torch.no_grad():
        output = values(model(**batch))
    found = [
        output[row][numbers == number]
        for row, numbers in enumerate(batch["_packed_seq_ids"])
        for number in range(1, int(numbers.max()) + 1)
    ]
    by_length = {len(part): part for part in found}
    return {
        len(part): float((by_length[len(part)] - part).abs().max() / part.abs().max())
        for part in truth
    }


@pytest.mark.parametrize(
    "build",
    [
        lambda: scaled(LlamaConfig, "dynamic"),
        lambda: scaled(LlamaConfig, "longrope"),
        lambda: scaled(Phi3Config, "longrope", original_max_position_embeddings=8),
    ],
    ids=["llama-dynamic", "llama-longrope", "phi3-longrope"],
)
def test_a_long_document_does_not_change_the_rotary_table_of_short_ones(build):
    docs = documents(LENGTHS)
    truth = fresh(build, docs)
    before = errors(build(), docs, truth)
    assert max(before[length] for length in (7, 5)) > 1e-3
    model = build()
    report = isolate(model)
    assert "scaled rotary table" in report.applied[0].repair
    for options in (
        {},
        {},
        {"row_length": 21},
    ):  # twice: the table must not remember the last batch
        assert max(errors(model, docs, truth, **options).values()) < 1e-5
    report.remove()
    assert max(errors(model, docs, truth).values()) > 1e-3


def test_documents_without_a_short_one_among_them_get_tables_of_their_own():
    docs = documents([11, 20, 9])
    truth = fresh(lambda: scaled(LlamaConfig, "dynamic"), docs)
    model = scaled(LlamaConfig, "dynamic")
    with isolate(model):
        errors(
            model,
            documents([30, 12]),
            fresh(lambda: scaled(LlamaConfig, "dynamic"), documents([30, 12])),
        )
        assert max(errors(model, docs, truth).values()) < 1e-5


def test_the_attention_temperature_counts_from_each_documents_start():
    docs = documents(LENGTHS)
    build = lambda: tiny_model("llama4_text", attn_implementation="neat_varlen")  # noqa: E731
    truth = fresh(build, docs)
    assert max(errors(build(), docs, truth).values()) > 1e-3
    model = build()
    with isolate(model):
        assert max(errors(model, docs, truth).values()) < 1e-5


def batch_of(model, lengths, **options):
    collate = DataCollatorForNeatPacking(model, **options)
    return collate([{"input_ids": ids.tolist()} for ids in documents(lengths)])


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_the_collator_refuses_documents_of_different_rotary_tables_and_names_the_length(rope_type):
    model = scaled(LlamaConfig, rope_type)
    batch_of(model, [7, 1, 8, 5])
    with pytest.raises(UnsupportedModelError, match=r"(?s)more than 8 tokens.*12.*max_length=8"):
        batch_of(model, LENGTHS)
    # A padding tail is numbered too, and longer than any document here.
    with pytest.raises(UnsupportedModelError, match=r"more than 8 tokens"):
        batch_of(model, [7, 1, 8, 5], row_length=32)
    with isolate(model):
        batch_of(model, LENGTHS, row_length=21)
    with pytest.raises(UnsupportedModelError, match=r"isolate\(model\)"):
        batch_of(model, LENGTHS)


def test_documents_that_are_all_long_share_the_long_table_of_longrope():
    lengths = [11, 20, 9]
    model = scaled(LlamaConfig, "longrope")
    batch = batch_of(model, lengths)
    batch.pop("labels")
    docs = documents(lengths)
    truth = fresh(lambda: scaled(LlamaConfig, "longrope"), docs)
    with torch.no_grad():
        found = values(model(**batch))[0].split(lengths)
    for part, alone in zip(found, truth, strict=True):
        torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-4)
    # A dynamic table remembers the longest document that it has seen.
    with pytest.raises(UnsupportedModelError, match="follow the longest document"):
        batch_of(scaled(LlamaConfig, "dynamic"), lengths)


def test_training_does_not_begin_with_a_collator_that_does_not_know_the_length():
    model = scaled(LlamaConfig, "longrope")
    require_known_rotary_limit(model, DataCollatorForNeatPacking(model))
    require_known_rotary_limit(tiny_model("llama"), DataCollatorForNeatPacking())
    with pytest.raises(
        ContractError, match=r"LlamaForCausalLM.*more than 8 tokens.*isolate\(model\)"
    ):
        require_known_rotary_limit(model, DataCollatorForNeatPacking())
    with isolate(model):
        collator = DataCollatorForNeatPacking(model)
        require_known_rotary_limit(model, collator)
        require_known_rotary_limit(model, DataCollatorForNeatPacking())
    # The tables came off with the hooks.
    with pytest.raises(ContractError, match="more than 8 tokens"):
        require_known_rotary_limit(model, collator)
