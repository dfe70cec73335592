"""Tokens of documents: which column holds the text, and the tokenizer that reads it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_neat_packing.errors import ColumnError
from hf_neat_packing.sources.documents import first_line_of_cause

if TYPE_CHECKING:
    import datasets

TOKEN_COLUMN = "input_ids"


def text_column(dataset: "datasets.Dataset", name: str | None = None) -> str | None:
    """Say which column holds the text; None for a data set that is tokenized already.

    Args:
        dataset: The documents.
        name: The column, where the user has named it.

    Raises:
        ColumnError: If the column is not there or holds no text, or if none can be told.
    """
    columns = dataset.column_names
    strings = [
        column
        for column in columns
        if getattr(dataset.features[column], "dtype", None) in ("string", "large_string")
    ]
    if name is not None:
        if name in strings:
            return name
        raise ColumnError(
            f"Column {name!r} is {'no text' if name in columns else 'not there'}; text columns: "
            f"{', '.join(strings) or 'none'}; all columns: {', '.join(columns)}. "
            "Write --text-column with one that holds text."
        )
    if TOKEN_COLUMN in columns:
        return None
    if "text" in strings or len(strings) == 1:
        return "text" if "text" in strings else strings[0]
    choice = f"Write --text-column {strings[0]}" if strings else "None of them holds text"
    raise ColumnError(
        f"No column is known to hold the documents: there is no {TOKEN_COLUMN!r} and no 'text' "
        f"among {', '.join(columns)}. {choice}"
        + (f", or another of {', '.join(strings)}." if len(strings) > 1 else ".")
    )


def load_tokenizer(name: str | None) -> Any:
    """Load a tokenizer.

    Args:
        name: A folder, a `tokenizer.json` or an id; None where the user gave none.

    Raises:
        ColumnError: If there is none.
    """
    if name is None:
        raise ColumnError(
            "The documents are text, and text has a length only by a tokenizer. Write --tokenizer "
            "with a folder, a tokenizer.json, or the id of the model that will be trained."
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ColumnError(
            f"No tokenizer could be loaded from {name!r} ({first_line_of_cause(error)}). Accepted: a folder that "
            "`save_pretrained` wrote, a tokenizer.json, or the id of a model on the Hugging Face Hub."
        ) from error


def token_ids(texts: list[Any], tokenizer: Any, *, first: int = 0) -> Iterator[list[int]]:
    """Turn texts into token ids, each ended by the tokenizer's end-of-text token if it has one.

    Args:
        texts: Documents.
        tokenizer: A Hugging Face tokenizer; the special tokens are those it adds by itself.
        first: Number of the first text, for the error.

    Raises:
        ColumnError: If a document is no text.
    """
    for number, text in enumerate(texts, start=first):
        if not isinstance(text, str):
            raise ColumnError(
                f"Document {number} is {text!r}, not text. Remove it or give it text before packing."
            )
    end = tokenizer.eos_token_id
    encoded = tokenizer(
        texts, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    for ids in encoded["input_ids"]:
        yield ids if end is None or ids[-1:] == [end] else [*ids, end]
