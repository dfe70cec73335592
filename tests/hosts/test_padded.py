"""Padded batches run packed: every row as it is alone, and values back where their tokens were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_runs import excess, padded, rows_of
from tiny_models import tiny_model
from trainer_runs import quiet
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, Mamba2ForCausalLM

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    isolate,
    pack_padded,
    padding_free,
    preference_documents,
    token_logps,
    unpack_logps,
    unpack_to_padded,
)
from hf_neat_packing.errors import (
    BoundaryError,
    ColumnError,
    ContractError,
    UnsupportedModelError,
)

LENGTHS = (3, 1, 8, 5)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


def alone(rows):
    return lambda model: [model(input_ids=row[None]).logits[0] for row in rows]


def real_tokens(batch, how=lambda model, batch: model(**batch).logits):
    def answer(model):
        values = how(model, batch)
        return [row[mask.bool()] for row, mask in zip(values, batch["attention_mask"], strict=True)]

    return answer


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        attn_implementation="neat_varlen",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5
    )
)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_rows_come_back_where_they_were_whatever_pads_them(shapes):
    width = max(sum(shape) for shape in shapes) or 1
    mask = torch.zeros(len(shapes), width, dtype=torch.int64)
    for row, (left, length, _) in zip(mask, shapes, strict=True):
        row[left : left + length] = 1
    ids = torch.arange(1, mask.numel() + 1).view_as(mask)
    if not mask.any():
        with pytest.raises(BoundaryError, match="no real token"):
            pack_padded({"input_ids": ids, "attention_mask": mask})
        return
    packed = pack_padded({"input_ids": ids, "attention_mask": mask})
    lengths = [length for _, length, _ in shapes if length]
    assert packed["input_ids"].shape == (1, sum(lengths))
    assert packed["cu_seq_lens_q"].diff().tolist() == lengths
    assert "labels" not in packed
    assert torch.equal(
        unpack_to_padded(packed["input_ids"], mask, fill=-1), ids.where(mask == 1, -1)
    )


def test_c30_left_padded_rows_get_their_own_positions_and_log_probabilities_back():
    model, rows = gpt2(), rows_of((3, 5))
    batch = padded(rows, "left")
    packed = pack_padded(batch, DataCollatorForNeatPacking(model))
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]

    def log_probabilities(model, batch):
        packed = pack_padded(batch, DataCollatorForNeatPacking(model))
        return unpack_to_padded(token_logps(model(**packed), packed), batch["attention_mask"])

    def by_hand(model):
        found = []
        for row in rows:
            logps = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
            chosen = logps.gather(1, row[1:, None]).squeeze(1)
            found.append(torch.cat([chosen.new_zeros(1), chosen]))
        return found

    assert excess(model, real_tokens(batch, log_probabilities), by_hand) <= 1
    assert (log_probabilities(model, batch)[batch["attention_mask"] == 0] == 0).all()

    def without_positions(model, batch):
        logits = model(**batch).logits
        shifted = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])
        return torch.nn.functional.pad(shifted.squeeze(2), (1, 0))

    assert excess(model, real_tokens(batch, without_positions), by_hand) > 100, (
        "the usual padded way"
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "neat_varlen"), ("llama", "sdpa"), ("gemma3", "eager"), ("gemma3", "neat_varlen"),
        ("bert", "neat_varlen"), ("modernbert", "sdpa"),
    ],
)  # fmt: skip
def test_a_padding_free_model_answers_for_padded_rows_as_for_each_alone(name, key):
    rows = rows_of(LENGTHS)
    model = tiny_model(name, key)
    reference = tiny_model(name, "eager")
    with padding_free(model):
        for side in ("left", "right"):
            batch = padded(rows, side)
            far = excess(model, real_tokens(batch), alone(rows), reference=reference)
            assert far <= 1, side
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_padding_free_positions_are_those_of_the_rows_and_plain_padding_fails_the_comparison():
    model, rows = gpt2(), rows_of(LENGTHS)
    batch = padded(rows, "left")
    assert excess(model, real_tokens(batch), alone(rows)) > 100
    with padding_free(model):
        assert excess(model, real_tokens(batch), alone(rows)) <= 1


def test_the_layers_see_one_row_of_real_tokens():
    model, batch = tiny_model("llama"), padded(rows_of(LENGTHS), "left")
    seen = []
    model.model.layers[0].register_forward_hook(
        lambda m, args, output: seen.append(output.shape[:2])
    )
    with padding_free(model):
        seen.clear()
        output = model(**batch, output_hidden_states=True)
        assert seen == [(1, sum(LENGTHS))]
        assert {h.shape[:2] for h in output.hidden_states} == {batch["input_ids"].shape}
        seen.clear()
        model(**{name: value[2:3] for name, value in batch.items()})
        assert seen == [(1, 8)], "a row without padding is left alone"


def test_generation_and_packed_batches_pass_unchanged():
    model, batch = tiny_model("llama"), padded(rows_of((3, 6)), "left")
    wanted = model.generate(**batch, max_new_tokens=6, do_sample=False)
    packed = DataCollatorForNeatPacking(model)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    logits = model(**packed).logits
    with padding_free(model):
        assert torch.equal(model.generate(**batch, max_new_tokens=6, do_sample=False), wanted)
        assert torch.equal(model(**packed).logits, logits)


def test_gradient_checkpointing_and_nested_models_find_their_own_rows():
    rows = rows_of(LENGTHS)
    model, teacher = tiny_model("llama"), tiny_model("qwen3")
    batch, other = padded(rows, "left"), padded(rows[:2], "right")
    with padding_free(model), padding_free(teacher):

        def with_teacher(module, args, output):
            teacher(**other)

        handle = model.model.layers[0].register_forward_hook(with_teacher)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        far = excess(model, real_tokens(batch), alone(rows), reference=tiny_model("llama"))
        assert far <= 1
        handle.remove()


def test_router_logits_are_put_back_too():
    model, batch = tiny_model("mixtral"), padded(rows_of(LENGTHS), "right")
    with padding_free(model):
        output = model(**batch, output_router_logits=True, labels=batch["input_ids"])
        tokens = batch["input_ids"].numel()
        assert {r.shape[0] for r in output.router_logits} == {tokens}
        kept = output.router_logits[0][batch["attention_mask"].flatten() == 0]
        assert (kept == 0).all()
        assert torch.isfinite(output.aux_loss)


def test_isolated_models_run_padding_free_too():
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=2,
        chunk_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config).eval()
    rows = rows_of((3, 6, 4))
    with pytest.raises(UnsupportedModelError, match="isolate"):
        padding_free(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for part in (model.base_model, model):
        with isolate(part), padding_free(model):
            assert excess(model, real_tokens(padded(rows, "left")), alone(rows)) <= 1


def test_what_cannot_be_packed_is_refused_by_name():
    batch = padded(rows_of((3, 5)))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with pytest.raises(BoundaryError, match="attention_mask"):
        pack_padded({"input_ids": ids})
    with pytest.raises(BoundaryError, match="document numbers"):
        pack_padded({"input_ids": ids, "attention_mask": mask * 2})
    with pytest.raises(ColumnError, match="old_per_token_logps"):
        pack_padded(batch | {"old_per_token_logps": torch.zeros(2, 4)})
    with pytest.raises(ColumnError, match="pixel_values"):
        pack_padded(batch | {"pixel_values": torch.zeros(2, 5)})
    with pytest.raises(ColumnError, match="position_ids"):
        pack_padded(batch | {"position_ids": torch.ones(2, 5, dtype=torch.int64)})
    with pytest.raises(BoundaryError, match="8 tokens"):
        unpack_to_padded(torch.zeros(1, 5), mask)
    model = tiny_model("llama", "eager")
    with padding_free(model):
        with pytest.raises(ContractError, match="embeddings"):
            model(inputs_embeds=torch.zeros(2, 5, 32), attention_mask=mask)
        with pytest.raises(UnsupportedModelError, match="attentions"):
            model(**batch, output_attentions=True)
        assert model(input_ids=ids[1:]).logits.shape[:2] == (1, 5), "and the hooks still work"
    with pytest.raises(UnsupportedModelError, match="base_model"):
        padding_free(torch.nn.Linear(2, 2))


def test_further_columns_are_packed_by_their_shape():
    batch = padded(rows_of((3, 5)), "left")
    trained = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    more = {
        "advantages": torch.tensor([0.5, -1.0]), "ref": batch["input_ids"] * 0.5, "completion_mask": trained
    }  # fmt: skip
    packed = pack_padded(batch | more)
    assert packed["advantages"].tolist() == [0.5, -1.0]
    assert torch.equal(packed["ref"], packed["input_ids"] * 0.5)
    assert (packed["labels"] >= 0).int().tolist() == [[0, 1, 1, 0, 0, 1, 1, 1]]


def test_log_probabilities_of_pairs_are_those_of_each_answer_alone():
    model = tiny_model("llama")
    pairs = [
        {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10]},
        {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14, 15, 16]},
    ]
    documents = preference_documents(pairs)

    def packed(model):
        batch = DataCollatorForNeatPacking(model, pad_to_multiple_of=8)(documents)
        return list(unpack_logps(model(**batch), batch)[:, None])

    def by_hand(model):
        found = []
        for answer in ("chosen_ids", "rejected_ids"):
            for pair in pairs:
                ids = torch.tensor(pair["prompt_ids"] + pair[answer])
                logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                start = len(pair["prompt_ids"]) - 1
                found.append(logps.gather(1, ids[1:, None])[start:].sum(0))
        return found

    assert excess(model, packed, by_hand) <= 1
    chosen, rejected = torch.cat(packed(model)).chunk(2)
    assert torch.stack([chosen, rejected]).unique().numel() == 4
    batch = DataCollatorForNeatPacking(model)(documents)
    average = unpack_logps(model(**batch), batch, average=True)
    counts = torch.tensor([2, 1, 1, 4])
    assert torch.allclose(average * counts, torch.cat([chosen, rejected]))
    with pytest.raises(ContractError, match="_packed_seq_ids"):
        unpack_logps(model(**batch), {"input_ids": batch["input_ids"]})
    with pytest.raises(ColumnError, match="rejected_ids"):
        preference_documents([{"prompt_ids": [1], "chosen_ids": [2]}])
