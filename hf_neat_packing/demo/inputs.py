"""What the demonstration works on: documents as tokens, and a model that can read them."""

from pathlib import Path
from typing import Any

import numpy as np

from hf_neat_packing.dataset.packed_dataset import Pack, PackedDataset
from hf_neat_packing.demo.corpus import stdlib_functions
from hf_neat_packing.demo.model import small_llama
from hf_neat_packing.demo.tokenizer import demo_tokenizer
from hf_neat_packing.errors import ColumnError, UnsupportedModelError
from hf_neat_packing.sources import (
    TOKEN_COLUMN,
    load_documents,
    load_tokenizer,
    text_column,
    token_ids,
)


def tokenized_documents(
    *, model: str | None, data: str | None, column: str | None, split: str, most: int
) -> tuple[Any, Any, list[str]]:
    """Collect documents as tokens.

    Args:
        model: Folder or id of the model whose tokenizer is taken; one is trained by default.
        data: Source of documents; the functions of the standard library by default.
        column: Column with the text, where it cannot be told.
        split: Split of the data.
        most: Documents taken, from the first on.

    Returns:
        A `datasets.Dataset` with `input_ids`, the tokenizer (None where the data had tokens and
        no model was given), and lines that say where they are from.

    Raises:
        ColumnError: If the data cannot be read, or is no text.
    """
    tokenizer = None if model is None else load_tokenizer(model)
    if data is None:
        texts: list[Any] = stdlib_functions()
        total, origin = len(texts), "functions of this Python's standard library"
        texts = texts[:most]
    else:
        source = load_documents(data, split=split)
        total, origin = len(source), f"documents of {data}"
        source = source.select(range(min(most, total)))
        found = text_column(source, column)
        if found is None:
            tokens = source.select_columns([TOKEN_COLUMN])
            return tokens, tokenizer, [_count(total, len(source), origin + ", tokenized already")]
        texts = list(source[found])
    said = [_count(total, len(texts), origin)]
    if tokenizer is None:
        tokenizer, cached = demo_tokenizer([text for text in texts if isinstance(text, str)])
        made = "read from the cache" if cached else "trained on them now"
        said.append(f"byte-level BPE tokenizer, {len(tokenizer):,} entries, {made}")
    return _as_dataset(token_ids(texts, tokenizer)), tokenizer, said


def _count(total: int, taken: int, origin: str) -> str:
    if taken == total:
        return f"{total:,} {origin}"
    return f"the first {taken:,} of {total:,} {origin} (--max-documents)"


def _as_dataset(documents: Any) -> Any:
    import datasets

    features = datasets.Features({TOKEN_COLUMN: datasets.List(datasets.Value("int32"))})
    return datasets.Dataset.from_dict({TOKEN_COLUMN: list(documents)}, features=features)


def model_for(model: str | None, tokens: Any, tokenizer: Any, *, max_length: int, seed: int) -> Any:
    """Load the model, or make a small one, in float32 and attending by `neat_varlen`.

    Args:
        model: Folder or id; a Llama of about 5 million random weights by default.
        tokens: The documents.
        tokenizer: The tokenizer, or None.
        max_length: Tokens of a pack.
        seed: Of the random weights.

    Raises:
        ColumnError: If there is no such model, or the documents have tokens that it does not know.
        UnsupportedModelError: If its class knows attention keys by a table of its own.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_neat_packing.attention import ATTENTION_KEY
    from hf_neat_packing.audit.own_tables import reason_of_own_table

    highest = _highest_token(tokens)
    if model is None:
        words = highest + 1 if tokenizer is None else max(len(tokenizer), highest + 1)
        end = None if tokenizer is None else tokenizer.eos_token_id
        return small_llama(vocab_size=words, max_length=max_length, end_of_text=end, seed=seed)
    try:
        network = AutoModelForCausalLM.from_pretrained(
            model, attn_implementation=ATTENTION_KEY, dtype=torch.float32
        )
    except OSError as error:
        raise ColumnError(
            f"No model could be loaded from {model!r}: {str(error).strip().splitlines()[0]} "
            "Accepted: a folder that `save_pretrained` wrote, or the id of a causal language model."
        ) from error
    except KeyError as error:
        if error.args != (ATTENTION_KEY,):
            raise
        architecture = (AutoConfig.from_pretrained(model).architectures or [""])[0]
        raise UnsupportedModelError(
            f"{model} cannot be loaded with attn_implementation={ATTENTION_KEY!r}, which the demonstration shows: "
            f"{reason_of_own_table(architecture, ATTENTION_KEY)}"
        ) from error
    known = network.get_input_embeddings().num_embeddings
    if highest >= known:
        raise ColumnError(
            f"The documents have token {highest}, and {model} knows {known:,} tokens: they were "
            "made by another tokenizer. Give the text, or tokens of this model's tokenizer."
        )
    return network


def _highest_token(tokens: Any) -> int:
    """Find the highest token id, a batch at a time."""
    import pyarrow.compute as compute

    columns = tokens.with_format("arrow").iter(batch_size=10_000)
    batches = (compute.max(compute.list_flatten(batch[TOKEN_COLUMN])).as_py() for batch in columns)
    return max((found for found in batches if found is not None), default=0)


def pack_to_look_at(packed: PackedDataset) -> Pack:
    """Take the pack with the median number of documents, of those that have two or more.

    Args:
        packed: The packs.

    Raises:
        ColumnError: If no pack has two documents.
    """
    counts = np.diff(packed.plan.offsets)
    several = np.flatnonzero(counts > 1)
    if not len(several):
        report = packed.report
        raise ColumnError(
            f"Each of the {report.packs:,} packs holds a single document ({report.documents:,} "
            f"documents, the longest of {report.longest_document:,} tokens, packs of "
            f"{report.max_length:,}): there is nothing to pack together. Give shorter or more "
            "documents, or a larger --max-length."
        )
    by_count = several[np.argsort(counts[several], kind="stable")]
    return packed[int(by_count[len(by_count) // 2])]


def check_positions(model: Any, packed: PackedDataset) -> None:
    """Refuse documents that are longer than the positions that the model has.

    Args:
        model: The model.
        packed: The packs; positions restart with each document, so packs may be longer.

    Raises:
        UnsupportedModelError: If a document is too long.
    """
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = int(packed.plan.lengths.max(initial=0))
    if known is not None and longest > known:
        raise UnsupportedModelError(
            f"A document has {longest:,} tokens and the model has {known:,} positions. Packs may be "
            f"longer than that, documents may not. Write: --max-length {known} (longer documents "
            "are then split), or --on-overlong drop with it."
        )


def check_output(output: Path, marker: str) -> None:
    """Refuse a folder that holds anything but an earlier demonstration.

    Args:
        output: The folder.
        marker: Name of the file that an earlier demonstration has left.

    Raises:
        ColumnError: If something else could be overwritten.
    """
    if output.exists() and not output.is_dir():
        raise ColumnError(f"{output} is a file. Give a folder for the model: --output FOLDER.")
    if output.is_dir() and any(output.iterdir()) and not (output / marker).is_file():
        raise ColumnError(
            f"{output} holds files that are not from an earlier demonstration, and they could be "
            "overwritten. Give a new or an empty folder: --output FOLDER."
        )
