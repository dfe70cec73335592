"""Supervised fine-tuning on packs with the Trainer: loss on answers only, evaluation, save, reload.

    python examples/trainer_sft.py
    python examples/trainer_sft.py --model ./my-model --data my.jsonl

`my.jsonl` has one object a line with `prompt` and `completion`. Without it the questions are the names of
Python's builtins and the answers their docstrings; without a model a small Llama with random weights is
trained, on bytes.
"""

import argparse
import builtins
from pathlib import Path

import datasets
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_neat_packing import (  # registers neat_varlen
    DataCollatorForNeatPacking,
    PackingCallback,
    pack_dataset,
)


def read_examples(path):
    """Read prompts and completions, one object a line."""
    if path is not None:
        return datasets.load_dataset("json", data_files=path, split="train")
    names = [name for name in dir(builtins) if getattr(builtins, name).__doc__]
    return datasets.Dataset.from_dict(
        {
            "prompt": [f"What is {name}?\n" for name in names],
            "completion": [getattr(builtins, name).__doc__.split("\n\n")[0] for name in names],
        }
    )


def load_model(name):
    """Load model and tokenizer, or make a small Llama that reads bytes."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="neat_varlen")
        return model, AutoTokenizer.from_pretrained(name)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="neat_varlen",
    )
    return LlamaForCausalLM(config), tokenizer


def to_tokens(example, tokenizer):
    """Join prompt and completion; only the completion, and the end after it, is learned."""
    prompt = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
    completion = tokenizer(example["completion"], add_special_tokens=False)["input_ids"]
    completion.append(tokenizer.eos_token_id)
    return {
        "input_ids": prompt + completion,
        "labels": [-100] * len(prompt) + completion,
    }


def main():
    """Train, evaluate, save, reload and answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or id; default: a small random Llama")
    parser.add_argument("--data", help="JSONL with prompt and completion")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--output", type=Path, default=Path("sft-output"))
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model)
    examples = read_examples(arguments.data)
    tokens = examples.map(
        to_tokens, fn_kwargs={"tokenizer": tokenizer}, remove_columns=examples.column_names
    )
    splits = tokens.train_test_split(test_size=0.1, seed=0)
    # Nothing is cut unseen: a document longer than a pack is an error unless you say what to do.
    packs = pack_dataset(splits, max_length=arguments.max_length, on_overlong="truncate")
    print(packs["train"].report)

    trainer = Trainer(
        model,
        TrainingArguments(
            str(arguments.output),
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            warmup_steps=arguments.steps // 10,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            logging_steps=max(1, arguments.steps // 4),
            eval_strategy="steps",
            eval_steps=max(1, arguments.steps // 2),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=packs["train"],
        eval_dataset=packs["test"],
        data_collator=DataCollatorForNeatPacking(model),
        # Checks, before the first step, that the model that trains is the one that was collated for.
        callbacks=[PackingCallback()],
    )
    trainer.train()

    trainer.save_model(str(arguments.output))
    tokenizer.save_pretrained(arguments.output)
    # A saved config does not hold the attention key: name it again, or leave it out to run on sdpa.
    model = AutoModelForCausalLM.from_pretrained(
        arguments.output, attn_implementation="neat_varlen"
    )
    prompt = tokenizer(examples[0]["prompt"], add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(answer[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
