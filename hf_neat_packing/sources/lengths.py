"""Lengths of documents, for a plan: from a file of lengths, or counted."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hf_neat_packing.errors import ColumnError
from hf_neat_packing.sources.documents import load_documents
from hf_neat_packing.sources.tokens import TOKEN_COLUMN, load_tokenizer, text_column, token_ids

_BATCH = 10_000


def document_lengths(
    source: str, *, tokenizer: str | None = None, column: str | None = None, split: str = "train"
) -> NDArray[np.int64]:
    """Say how many tokens each document has.

    Args:
        source: A file of lengths as `load_lengths` takes it, or documents as `load_documents` does.
        tokenizer: Folder, file or id of a tokenizer, for documents that are text.
        column: Column with the text, where it cannot be told.
        split: Split of the data.

    Returns:
        Tokens, int64 `[documents]`.

    Raises:
        ColumnError: If the source cannot be read, or is text and there is no tokenizer.
    """
    lengths = load_lengths(source)
    if lengths is not None:
        return lengths
    documents = load_documents(source, split=split)
    found = text_column(documents, column)
    if found is None:
        from hf_neat_packing.dataset.document_table import DocumentTable

        return DocumentTable(documents.select_columns([TOKEN_COLUMN]), None).lengths()
    loaded = load_tokenizer(tokenizer)
    counts: list[int] = []
    for first in range(0, len(documents), _BATCH):
        texts = list(documents[first : first + _BATCH][found])
        counts += [len(ids) for ids in token_ids(texts, loaded, first=first)]
    return np.array(counts, dtype=np.int64)


def load_lengths(source: str) -> NDArray[np.int64] | None:
    """Read document lengths from a file that holds nothing else; None for any other source.

    Args:
        source: A `.npy` file of integers, a `.json` list of integers, or a `.txt` file with one
            integer a line.

    Raises:
        ColumnError: If a `.npy` file holds anything but one row of integers.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        return None
    if path.suffix.lower() == ".npy":
        lengths = np.load(path, allow_pickle=False)
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise ColumnError(
                f"{path} holds {lengths.dtype} of shape {lengths.shape}. Accepted: integers of "
                "shape [documents]."
            )
        wide: NDArray[np.int64] = lengths.astype(np.int64)
        return wide
    try:
        if path.suffix.lower() == ".txt":
            return np.array([int(line) for line in _lines(path)], dtype=np.int64)
        if path.suffix.lower() == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, list) and all(type(length) is int for length in found):
                return np.array(found, dtype=np.int64)
    except ValueError:
        return None
    return None


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.strip())
