"""TRL's trainers on packs: the supported recipes against TRL's own padded runs, and what TRL refuses."""

import copy

import datasets
import pytest
import torch
from tiny_models import VOCAB, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import CountingTrainer, Leaky, arguments, excess, quiet, train, weights
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_neat_packing import (
    DataCollatorForNeatPacking,
    PackingCallback,
    labels_from_masks,
    pack_dataset,
    padding_free,
)
from hf_neat_packing.errors import ContractError

STEPS = 3
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|> {% generation %}{{ m['content'] }} <eos> "
    "{% endgeneration %}{% else %}<|user|> {{ m['content'] }} {% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    whole_words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=whole_words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = TEMPLATE
    return made


class Whole(Leaky):
    """The control that must fail, with the mask of ones that TRL counts tokens by."""

    def __call__(self, features, **kwargs):
        batch = super().__call__(features, **kwargs)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def words(generator, low, high):
    count = int(torch.randint(low, high, (1,), generator=generator))
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 90, (count,), generator=generator))


def drawn(make, count=24):
    generator = torch.Generator().manual_seed(0)
    return datasets.Dataset.from_list([make(generator) for _ in range(count)])


def prompts_and_completions():
    return drawn(lambda g: {"prompt": words(g, 1, 9), "completion": " " + words(g, 1, 9)})


def conversations():
    def make(g):
        turns = [("user", 1), ("assistant", 2)] * int(torch.randint(1, 3, (1,), generator=g))
        return {"messages": [{"role": r, "content": words(g, 1, 5)} for r, _ in turns]}

    return drawn(make)


def preferences():
    return drawn(
        lambda g: {
            "prompt": words(g, 1, 9),
            "chosen": " " + words(g, 1, 9),
            "rejected": " " + words(g, 1, 5),
        }
    )


def options(folder, **more):
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "gradient_checkpointing": False, "bf16": False, "seed": 3,
    } | more  # fmt: skip


def tune(model, data, tokenizer, folder, *, collator=None, callbacks=(), **more):
    trainer = SFTTrainer(
        model, SFTConfig(**options(folder, **more)), train_dataset=data, processing_class=tokenizer,
        data_collator=collator, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def padded_runs(data, tokenizer, folder, **more):
    """TRL's own way, padded, in float32 and float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model = tiny_model("llama", "sdpa", dtype)
        found.append((model, tune(model, data, tokenizer, folder, **more)))
    return found


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (prompts_and_completions, {"gradient_accumulation_steps": 2}),
        (conversations, {"assistant_only_loss": True}),
    ],
    ids=["completions", "assistant turns"],
)
def test_sft_on_documents_collated_into_rows_is_sft_on_padded_rows(folder, tokenizer, make, more):
    data = make()
    (reference, padded), (truth, _) = padded_runs(data, tokenizer, folder, **more)
    model, proven = tiny_model("llama"), PackingCallback()
    collator = DataCollatorForNeatPacking(model)
    packed = tune(model, data, tokenizer, folder, collator=collator, callbacks=[proven], **more)
    assert excess(model, reference, truth, STEPS) <= 1
    for name in ("loss", "num_tokens", "mean_token_accuracy", "entropy"):
        assert logged(packed, name) == pytest.approx(logged(padded, name), rel=1e-5), name
    assert len(proven.proof.layers) == 2
    assert any(label == -100 for labels in packed.train_dataset["labels"] for label in labels)
    leaky = tiny_model("llama", "sdpa")
    tune(leaky, data, tokenizer, folder, collator=Whole(leaky), **more)
    assert excess(leaky, reference, truth, STEPS) > 100


@pytest.mark.parametrize("skip", [False, True], ids=["prepared", "skip_prepare_dataset"])
def test_sft_on_written_packs_is_sft_on_their_documents(folder, tokenizer, skip):
    def to_tokens(example):
        prompt = tokenizer(example["prompt"])["input_ids"]
        completion = [*tokenizer(example["completion"])["input_ids"], tokenizer.eos_token_id]
        mask = [0] * len(prompt) + [1] * len(completion)
        return {"input_ids": prompt + completion, "completion_mask": mask}

    tokens = prompts_and_completions().map(to_tokens, remove_columns=["prompt", "completion"])
    tokens = tokens.map(labels_from_masks, remove_columns="completion_mask")
    packs = pack_dataset(tokens, max_length=32, materialize=True)
    more = {"per_device_train_batch_size": 2, "max_length": 8, "shuffle_dataset": False}
    model = tiny_model("llama")
    given = {"dataset_kwargs": {"skip_prepare_dataset": True}} if skip else {}
    trainer = tune(
        model, packs, tokenizer, folder, collator=DataCollatorForNeatPacking(model),
        callbacks=[PackingCallback()], **more, **given,
    )  # fmt: skip
    seen = trainer.train_dataset["input_ids"][:]
    assert seen == packs["input_ids"][:], "max_length counts documents here and cuts nothing"
    plain = tiny_model("llama")
    CountingTrainer(
        plain, arguments(folder, max_steps=STEPS, lr_scheduler_type="linear"), train_dataset=packs,
        data_collator=DataCollatorForNeatPacking(plain),
    ).train()  # fmt: skip
    # The Trainer itself, on the same packs, is exact by its own tests; TRL adds a fused head.
    moved = (weights(plain) - weights(tiny_model("llama"))).norm()
    assert (weights(model) - weights(plain)).norm() <= 1e-3 * moved


def test_trls_own_packing_is_exact_under_neat_varlen(folder, tokenizer):
    """Both runs take every document in each update, so that TRL may pack as it likes."""
    data = prompts_and_completions().select(range(12))
    whole = {"per_device_train_batch_size": 12, "max_steps": 2, "max_length": 64}
    (reference, _), (truth, _) = padded_runs(data, tokenizer, folder, **whole)
    model = tiny_model("llama")
    trainer = tune(model, data, tokenizer, folder, packing=True, **whole)
    assert len(trainer.train_dataset) < 12
    assert excess(model, reference, truth, 2) <= 1
    assert excess(tiny_model("llama"), reference, truth, 2) > 100


def test_what_trl_refuses(folder, tokenizer):
    model, data = tiny_model("llama"), prompts_and_completions()
    collator = DataCollatorForNeatPacking(model)
    for more in ({"packing": True}, {"padding_free": True, "max_length": None}):
        with pytest.raises(
            ValueError, match="custom data collator is not supported when using padding-free"
        ):
            tune(model, data, tokenizer, folder, collator=collator, **more)
    view = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[5, 6], [7]]}), max_length=4)
    with pytest.raises(TypeError, match=r"`Dataset` or `IterableDataset`, got `PackedDataset`"):
        tune(model, view, tokenizer, folder, collator=collator)
    marked = DataCollatorForNeatPacking(model, loss_per="document")
    with pytest.raises(RuntimeError, match="size of tensor"):
        tune(model, data, tokenizer, folder, collator=marked)
    missing = drawn(lambda g: {"messages": [{"role": "user", "content": words(g, 1, 5)}]})
    with pytest.raises(RuntimeError, match="no assistant"):
        tune(model, missing, tokenizer, folder, collator=collator, assistant_only_loss=True)


def test_masks_become_labels_before_a_trainer_removes_them_or_are_refused(folder):
    masked = datasets.Dataset.from_list(
        [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}] * 8
    )
    model = tiny_model("llama")
    collator = DataCollatorForNeatPacking(model)
    proven = {"callbacks": [PackingCallback()], "max_steps": 1}
    views = (masked, masked.map(labels_from_masks, remove_columns="completion_mask"))
    for view in [pack_dataset(data, max_length=8) for data in views]:
        for data in (view, view.materialize()):
            _, counts = train(model, data, collator, folder, **proven)
            assert counts == [8], "two targets for each of four documents"
    declared = pack_dataset(masked, max_length=8, columns={"completion_mask": "token"})
    with pytest.raises(ContractError, match=r"completion_mask.*labels_from_masks"):
        train(model, declared, collator, folder, **proven)
    kept = proven | {"remove_unused_columns": False}
    assert train(model, declared, collator, folder, **kept)[1] == [8]


def preferred(model, tokenizer, folder):
    reference = tiny_model("llama", "sdpa", model.dtype)
    trainer = DPOTrainer(
        model, reference, args=DPOConfig(**options(folder)), train_dataset=preferences(),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_dpo_runs_padding_free_and_is_dpo_on_padded_rows(folder, tokenizer):
    padded = {d: tiny_model("llama", "sdpa", d) for d in (torch.float32, torch.float64)}
    runs = {dtype: preferred(model, tokenizer, folder) for dtype, model in padded.items()}
    model, rows = tiny_model("llama"), []
    model.model.layers[0].register_forward_hook(
        lambda m, args, output: rows.append(output.shape[0])
    )
    with padding_free(model):
        rows.clear()
        packed = preferred(model, tokenizer, folder)
        assert set(rows) == {1}
    for name in ("loss", "rewards/margins", "logps/chosen"):
        ours, theirs = logged(packed, name), logged(runs[torch.float32], name)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name
    assert excess(model, padded[torch.float32], padded[torch.float64], STEPS) <= 1
    joined = tiny_model("llama")
    with padding_free(joined) as hooks:
        hooks.collator = DataCollatorForNeatPacking(joined, join_documents=True)
        preferred(joined, tokenizer, folder)
    assert excess(joined, padded[torch.float32], padded[torch.float64], STEPS) > 100


def test_a_reward_model_trains_padding_free_as_on_padded_rows(folder, tokenizer):
    def made(key, dtype=torch.float32):
        config = copy.deepcopy(tiny_model("llama", key).config)
        config.num_labels = 1
        torch.manual_seed(0)
        model = LlamaForSequenceClassification._from_config(config, attn_implementation=key)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        return model.to(dtype)

    def rewarded(model):
        trainer = RewardTrainer(
            model,
            RewardConfig(**options(folder)),
            train_dataset=preferences(),
            processing_class=tokenizer,
        )
        trainer.train()
        return logged(trainer)

    padded = {d: made("sdpa", d) for d in (torch.float32, torch.float64)}
    losses = {dtype: rewarded(model) for dtype, model in padded.items()}
    model, rows = made("neat_varlen"), []
    model.model.layers[0].register_forward_hook(
        lambda m, args, output: rows.append(output.shape[0])
    )
    with padding_free(model):
        rows.clear()
        assert rewarded(model) == pytest.approx(losses[torch.float32], rel=1e-4)
        assert set(rows) == {1}
    assert excess(model, padded[torch.float32], padded[torch.float64], STEPS) <= 1
    assert excess(made("sdpa"), padded[torch.float32], padded[torch.float64], STEPS) > 100


def test_grpo_generates_as_ever_and_trains_padding_free(folder, tokenizer):
    data = datasets.Dataset.from_list(
        [{"prompt": p} for p in ("w1 w2 w3", "w5", "w7 w8 w9 w10")] * 4
    )
    generated = []

    def rewarded(completions, **columns):
        generated.append(list(completions))
        return [float(len(text) % 5) for text in completions]

    def reinforced(model):
        more = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
        trainer = GRPOTrainer(
            model, rewarded, args=GRPOConfig(**options(folder, **more)), train_dataset=data,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()

    padded = {d: tiny_model("llama", "sdpa", d) for d in (torch.float32, torch.float64)}
    for model in padded.values():
        reinforced(model)
    model, rows = tiny_model("llama"), []
    model.model.layers[0].register_forward_hook(
        lambda m, args, output: rows.append((m.training, output.shape[0]))
    )
    with padding_free(model):
        rows.clear()
        reinforced(model)
    assert len(generated) == 3 * STEPS
    assert generated[:STEPS] == generated[STEPS : 2 * STEPS] == generated[2 * STEPS :]
    assert (True, 1) in rows, "training is packed"
    assert any(count == 4 for _, count in rows), "generation is not"
    assert excess(model, padded[torch.float32], padded[torch.float64], STEPS) <= 1
    assert excess(tiny_model("llama"), padded[torch.float32], padded[torch.float64], STEPS) > 100
