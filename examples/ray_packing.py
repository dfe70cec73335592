"""Pack tokenized parquet shards on Ray workers, and go on where a run that was killed stopped.

    python examples/ray_packing.py
    python examples/ray_packing.py --shards my-tokens/ --output my-packs --max-length 4096

Shards are parquet files with one document per row and its tokens in `input_ids`. Without --shards the
docstrings of Python's builtins are written as four of them, one token per byte. Call it again after a crash:
finished files are kept. Ray runs on this machine, or on the cluster that RAY_ADDRESS names.
"""

import argparse
import builtins
from pathlib import Path

import datasets

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.shards import pack_shards


def write_shards(folder):
    """Write the docstrings as four shards, if they are not there yet."""
    if folder.exists():
        return
    texts = [getattr(builtins, name).__doc__ or name for name in dir(builtins)]
    documents = datasets.Dataset.from_dict({"input_ids": [list(text.encode()) for text in texts]})
    folder.mkdir(parents=True)
    for number in range(4):
        documents.shard(4, number).to_parquet(folder / f"{number}.parquet")


def main():
    """Pack, and read the first batch back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, help="folder of parquet files with input_ids")
    parser.add_argument("--output", type=Path, default=Path("packs"))
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    if arguments.shards is None:
        arguments.shards = Path("docstring-shards")
        write_shards(arguments.shards)
    result = pack_shards(
        arguments.shards,
        arguments.output,
        max_length=arguments.max_length,
        on_overlong="split",
        tokens_per_file=2**14,
        num_workers=arguments.workers,
    )
    print(result)

    packs = datasets.load_dataset(str(arguments.output), split="train")
    batch = DataCollatorForNeatPacking()([packs[0]])
    tokens, documents = batch["input_ids"].numel(), int(batch["_packed_seq_ids"].max())
    print(f"the first pack: {tokens} tokens of {documents} documents, ready for a model")


if __name__ == "__main__":
    main()
