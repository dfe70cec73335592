"""Pack real documents and train on them: the docstrings of Python's builtins, a Llama, the Trainer."""

import builtins

import datasets
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_neat_packing import DataCollatorForNeatPacking, pack_dataset  # registers neat_varlen

texts = [getattr(builtins, name).__doc__ or name for name in dir(builtins)]
documents = datasets.Dataset.from_dict({"input_ids": [list(text.encode()) for text in texts]})
packs = pack_dataset(documents, max_length=2048, on_overlong="split")
print(packs.report)

shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(vocab_size=256, **shape, **heads, attn_implementation="neat_varlen")
model = LlamaForCausalLM(config)

args = TrainingArguments("out", max_steps=30, learning_rate=1e-2, per_device_train_batch_size=1,
                         logging_steps=10, save_strategy="no", report_to="none")  # fmt: skip
collator = DataCollatorForNeatPacking(model)
trainer = Trainer(model, args, train_dataset=packs, data_collator=collator)
trainer.train()
