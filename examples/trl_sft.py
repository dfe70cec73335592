"""Supervised fine-tuning of chats with TRL's SFTTrainer on packs: loss on the assistant's turns only.

    python examples/trl_sft.py
    python examples/trl_sft.py --model ./my-model --data my.jsonl

`my.jsonl` has one object a line with `messages`, and the tokenizer of `my-model` a chat template that marks
what the assistant says (`{% generation %}`). Without them two small chats for each of Python's builtins and a
small Llama with random weights are used.

TRL takes a collator of one's own only with `packing=False` and `padding_free=False`, its defaults; with either it
says "Passing a custom data collator is not supported when using padding-free." It takes no view ("`train_dataset`
must be a `Dataset` or `IterableDataset`, got `PackedDataset`."), so packs are written (`materialize=True`). Its
`max_length` would count the documents of a pack, and nothing needs cutting any more: `max_length=None`.

Documents need not be packed before: give TRL chats, `per_device_train_batch_size=8` and this collator, and each
batch is one row. TRL's own `packing=True`, without this collator, is exact too where the model runs `neat_varlen`.
"""

import argparse
import builtins
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from hf_neat_packing import (  # registers neat_varlen
    DataCollatorForNeatPacking,
    PackingCallback,
    pack_dataset,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def read_chats(path):
    """Read conversations, one object a line."""
    if path is not None:
        return datasets.load_dataset("json", data_files=path, split="train")
    described = {
        name: getattr(builtins, name).__doc__.split("\n\n")[0]
        for name in dir(builtins)
        if getattr(builtins, name).__doc__
    }
    chats = [
        [
            {"role": "user", "content": f"What is {name}?"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And where is it?"},
            {"role": "assistant", "content": f"{name} is in builtins."},
        ]
        for name, text in described.items()
    ]
    return datasets.Dataset.from_dict({"messages": chats})


def load_model(name, chats):
    """Load model and tokenizer, or make a small Llama and a tokenizer for these chats."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="neat_varlen")
        return model, AutoTokenizer.from_pretrained(name)
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    texts = (message["content"] for chat in chats["messages"] for message in chat)
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
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
    """Tokenize a chat and say which tokens are the assistant's; only these are learned."""
    chat = tokenizer.apply_chat_template(
        example["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    return {"input_ids": chat["input_ids"], "assistant_masks": chat["assistant_masks"]}


def main():
    """Pack chats, train on them and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or id; default: a small random Llama")
    parser.add_argument("--data", help="JSONL with messages")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--output", type=Path, default=Path("trl-sft-output"))
    arguments = parser.parse_args()

    chats = read_chats(arguments.data)
    model, tokenizer = load_model(arguments.model, chats)
    tokens = chats.map(
        to_tokens, fn_kwargs={"tokenizer": tokenizer}, remove_columns=chats.column_names
    )
    # Masks become labels here: trainers remove columns that a model does not take.
    packs = pack_dataset(
        tokens, max_length=arguments.max_length, on_overlong="truncate", materialize=True
    )
    print(f"{len(tokens)} chats in {len(packs)} packs")

    trainer = SFTTrainer(
        model,
        SFTConfig(
            str(arguments.output),
            max_length=None,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=1,
            logging_steps=max(1, arguments.steps // 4),
            save_strategy="no",
            report_to="none",
            bf16=torch.cuda.is_available(),  # TRL's default, which a CPU refuses
        ),
        train_dataset=packs,
        processing_class=tokenizer,
        data_collator=DataCollatorForNeatPacking(model),
        callbacks=[PackingCallback()],
    )
    trainer.train()
    trainer.save_model(str(arguments.output))


if __name__ == "__main__":
    main()
