"""Preference training with TRL's DPOTrainer, padding-free: policy and reference run packed, nothing else changes.

    python examples/dpo.py
    python examples/dpo.py --model ./my-model --data my.jsonl

`my.jsonl` has one object a line with `prompt`, `chosen` and `rejected`. Without it the docstring of each of Python's
builtins is preferred to the same one shouted; without a model a small Llama with random weights is trained, on
bytes.

DPOTrainer pads every answer to the longest of a batch. Inside `padding_free(model)` the layers see one row without
padding, and the trainer gets its values back at padded places. For a loop of your own, without a trainer, collate
`preference_documents(pairs)` and take `unpack_logps(outputs, batch).chunk(2)`.
"""

import argparse
import builtins
import copy
from pathlib import Path

import datasets
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import DPOConfig, DPOTrainer

from hf_neat_packing import padding_free  # registers neat_varlen


def read_preferences(path):
    """Read pairs of answers, one object a line."""
    if path is not None:
        return datasets.load_dataset("json", data_files=path, split="train")
    names = [name for name in dir(builtins) if getattr(builtins, name).__doc__]
    answers = [getattr(builtins, name).__doc__.split("\n\n")[0] for name in names]
    return datasets.Dataset.from_dict(
        {
            "prompt": [f"What is {name}?\n" for name in names],
            "chosen": answers,
            "rejected": [answer.upper() for answer in answers],
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
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="neat_varlen",
    )
    return LlamaForCausalLM(config), tokenizer


def main():
    """Train on preferences and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or id; default: a small random Llama")
    parser.add_argument("--data", help="JSONL with prompt, chosen and rejected")
    parser.add_argument(
        "--max-length", type=int, default=512, help="tokens of an answer and prompt"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("dpo-output"))
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model)
    reference = copy.deepcopy(model)
    # Each is run on a few padded rows first, and refused unless it answers for each row as for it alone.
    with padding_free(model), padding_free(reference):
        trainer = DPOTrainer(
            model,
            reference,
            args=DPOConfig(
                str(arguments.output),
                max_length=arguments.max_length,
                max_steps=arguments.steps,
                learning_rate=arguments.learning_rate,
                per_device_train_batch_size=8,
                logging_steps=max(1, arguments.steps // 4),
                save_strategy="no",
                report_to="none",
                bf16=torch.cuda.is_available(),  # TRL's default, which a CPU refuses
            ),
            train_dataset=read_preferences(arguments.data),
            processing_class=tokenizer,
        )
        trainer.train()
    trainer.save_model(str(arguments.output))


if __name__ == "__main__":
    main()
