"""Train on packs in a loop of one's own with accelerate: any number of processes give the same weights.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_two_processes.py
    python examples/accelerate_two_processes.py --accumulate 2

Both run the same updates on the same documents. Without GPUs `--multi_gpu` starts its processes on CPUs, where
`--cpu` would start a single one. Without --model a small Llama with random weights reads the docstrings of
Python's builtin types as bytes.

Leave `dispatch_batches` off: it cuts and joins batches on dimension 0, and the offsets of a packed row have
no row there (it fails, rather than mix documents). And let the sampler deal packs to the processes:
accelerate's own sharding would give some packs twice to fill the last step (`even_batches`), with their labels.
"""

import argparse
import builtins
from contextlib import nullcontext
from itertools import islice

import datasets
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_neat_packing import (  # registers neat_varlen
    DataCollatorForNeatPacking,
    RankBalancedPackSampler,
    pack_dataset,
)


def load_model(name):
    """Load a model, or make a small Llama that reads bytes; every process makes the same one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation="neat_varlen")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, **shape, **heads, attn_implementation="neat_varlen")
    return LlamaForCausalLM(config)


def packs_of_docstrings(max_length):
    """Pack the docstrings, one token per byte."""
    found = [getattr(builtins, name) for name in dir(builtins)]
    # Every process must find the same ones, whatever some package has put there.
    own = [value for value in found if isinstance(value, type) and value.__module__ == "builtins"]
    texts = [kind.__doc__ or kind.__name__ for kind in own]
    documents = datasets.Dataset.from_dict({"input_ids": [list(text.encode()) for text in texts]})
    return pack_dataset(documents, max_length=max_length, on_overlong="split")


def loader_of(packs, collator, accelerator, accumulate):
    """Give each process its share of every update, of like cost, and as many batches as the others."""
    sampler = RankBalancedPackSampler(
        packs,
        num_ranks=accelerator.num_processes,
        rank=accelerator.process_index,
        batches_per_update=accumulate,
    )
    return prepare_data_loader(
        DataLoader(packs, batch_sampler=sampler, collate_fn=collator),
        device=accelerator.device,
        put_on_device=True,
        # The sampler has dealt already: to the loader this is the only process.
        num_processes=1,
        process_index=0,
        dispatch_batches=False,
        even_batches=False,
    )


def main():
    """Train some updates and save the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or id; default: a small random Llama")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a process per update")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--output", help="folder to save the model in")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = load_model(arguments.model)
    collator = DataCollatorForNeatPacking(model)
    packs = packs_of_docstrings(arguments.max_length)
    batches = iter(loader_of(packs, collator, accelerator, arguments.accumulate))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}")

    for update in range(arguments.updates):
        group = list(islice(batches, arguments.accumulate))
        # A token counts the same in whichever process and batch it lies: divide by all targets of the update.
        targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
        targets = accelerator.reduce(targets, reduction="sum")
        shown = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(group):
            last = number == len(group) - 1
            with nullcontext() if last else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=targets).loss
                # Gradients are averaged over processes, and this loss is one process's part of a sum.
                accelerator.backward(loss * accelerator.num_processes)
            shown += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        shown = accelerator.reduce(shown, reduction="sum")
        accelerator.print(f"update {update}: loss {shown.item():.4f} over {int(targets)} targets")

    if arguments.output is not None and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(arguments.output)
    # Let go of the wrapped model before its processes part: freed after them, it can wait for ever.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
