"""Adapters and mixed dtypes on packs: exact, or refused by name."""

import copy

import peft
import pytest
import torch
from row_runs import excess, padded, rows_of
from tiny_models import tiny_model
from trainer_runs import arguments, packs, quiet
from transformers import LlamaForSequenceClassification, Trainer

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    PackingCallback,
    isolate,
    pack_sequence_classifier,
    padding_free,
)
from hf_neat_packing.errors import UnsupportedModelError

LENGTHS = (4, 1, 9, 5)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


def adapted(key="neat_varlen", dtype=torch.float32, method="lora", name="llama"):
    model = tiny_model(name, key).to(dtype)
    targets = (
        ["q_proj", "v_proj", "o_proj"] if method != "ia3" else ["k_proj", "v_proj", "down_proj"]
    )
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=targets, r=4, task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(
            target_modules=targets, r=4, use_dora=True, task_type="CAUSAL_LM"
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
    }[method]()
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                change = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.add_(change.to(parameter.dtype))
    return model.eval()


def alone(rows):
    return lambda model: [model(input_ids=row[None]).logits[0] for row in rows]


def packed(rows, keys=None):
    def answer(model):
        batch = DataCollatorForNeatPacking(model)([{"input_ids": row} for row in rows])
        if keys is not None:
            batch = {name: batch[name] for name in keys}
        return list(model(**batch).logits[0].split([len(r) for r in rows]))

    return answer


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("key", ["neat_varlen", "sdpa"])
def test_adapters_get_the_gradients_of_documents_alone(method, key):
    model, rows = adapted(key, method=method), rows_of(LENGTHS)
    reference = adapted("eager", method=method)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert excess(model, packed(rows), alone(rows), reference=reference) <= 1
    assert all(
        p.grad is not None and p.grad.norm() > 0 for p in model.parameters() if p.requires_grad
    )
    leaky = packed(rows, keys=["input_ids"])
    assert excess(model, leaky, alone(rows), reference=reference) > 100


def test_adapters_train_with_the_callback_and_checkpoint_and_run_padding_free(tmp_path):
    model = adapted().train()
    before = copy.deepcopy(model.state_dict())
    proven = PackingCallback()
    Trainer(
        model, arguments(tmp_path, max_steps=2, gradient_checkpointing=True), train_dataset=packs(),
        data_collator=DataCollatorForNeatPacking(model), callbacks=[proven],
    ).train()  # fmt: skip
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert len(proven.proof.layers) == 2
    model, rows = adapted(), rows_of(LENGTHS)
    batch = padded(rows, "left")
    with padding_free(model):
        far = excess(
            model,
            lambda m: [r[k.bool()] for r, k in zip(m(**batch).logits, batch["attention_mask"], strict=True)],
            alone(rows), reference=adapted("eager"),
        )  # fmt: skip
        assert far <= 1


def test_an_adapted_classifier_answers_once_a_document():
    def made(key):
        config = tiny_model("llama", key).config
        config.num_labels = 3
        torch.manual_seed(0)
        base = LlamaForSequenceClassification._from_config(config, attn_implementation=key)
        adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="SEQ_CLS")
        model = peft.get_peft_model(base, adapter)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        return model.eval()

    model, rows = made("neat_varlen"), rows_of(LENGTHS)
    with pack_sequence_classifier(model):

        def answer(model):
            collator = DataCollatorForNeatPacking(model)
            return list(model(**collator([{"input_ids": r} for r in rows])).logits[:, None])

        far = excess(
            model, answer, lambda m: [m(input_ids=r[None]).logits for r in rows], reference=made("eager")
        )  # fmt: skip
        assert far <= 1


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PromptTuningConfig"),
        (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PrefixTuningConfig"),
        (lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PromptEncoderConfig"),
    ],
)  # fmt: skip
def test_virtual_tokens_are_refused_by_name_everywhere(config, name):
    collator = DataCollatorForNeatPacking(tiny_model("llama"))
    model = peft.get_peft_model(tiny_model("llama"), config())
    checks = (DataCollatorForNeatPacking, padding_free, isolate)
    for check in checks:
        with pytest.raises(UnsupportedModelError, match=name) as error:
            check(model)
        assert "virtual tokens" in str(error.value)
    with pytest.raises(UnsupportedModelError, match=name):
        PackingCallback().on_train_begin(
            arguments("unused"), None, None, model=model,
            train_dataloader=torch.utils.data.DataLoader([], collate_fn=collator),
        )  # fmt: skip


def in_dtypes(**dtypes):
    """A change of a model: modules whose name ends in a key are cast to a dtype."""

    def change(model):
        for name, module in model.named_modules():
            for ending, dtype in dtypes.items():
                if name.endswith(ending):
                    module.to(dtype)
        return model

    return change


MIXES = {
    "bfloat16 all through": lambda: tiny_model("qwen3").bfloat16(),
    "float32 norms of queries and keys": lambda: in_dtypes(
        q_norm=torch.float32, k_norm=torch.float32
    )(tiny_model("qwen3").bfloat16()),
    "float32 LoRA in a bfloat16 model": lambda: adapted(dtype=torch.bfloat16),
    "float32 DoRA in a bfloat16 model": lambda: adapted(dtype=torch.bfloat16, method="dora"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_dtypes_meet_once_in_attention(mix):
    model, rows = MIXES[mix](), rows_of(LENGTHS)
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == ({torch.bfloat16} if "all" in mix else {torch.bfloat16, torch.float32})
    far = excess(model, packed(rows), alone(rows), coarsest=torch.bfloat16)
    assert far <= 1
    leaky = packed(rows, keys=["input_ids"])
    assert excess(model, leaky, alone(rows), coarsest=torch.bfloat16) > 3 * far


@pytest.mark.parametrize("packs_them", [True, False], ids=["packed", "one document"])
def test_float32_queries_and_half_values_under_autocast_give_half_outputs(packs_them):
    model, rows = tiny_model("llama"), rows_of(LENGTHS if packs_them else LENGTHS[:1])
    dtypes = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: dtypes.append(args[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        packed(rows)(model)
    assert dtypes == [torch.bfloat16]
