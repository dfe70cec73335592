"""Where the commands find documents: a file, a folder or a data set's id; text becomes tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_neat_packing.errors import ColumnError, MissingDependencyError

if TYPE_CHECKING:
    import datasets

_READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
TOKEN_COLUMN = "input_ids"
_ACCEPTED = (
    f"a file ({', '.join(_READERS)}), a folder that `save_to_disk` wrote or that holds such files, "
    "or the id of a data set on the Hugging Face Hub"
)


def load_documents(source: str, *, split: str = "train") -> "datasets.Dataset":
    """Load documents, one per row, memory-mapped.

    Args:
        source: A file, a folder or a data set id. In a `.txt` file blank lines separate
            documents; a text without any blank line has one document a line.
        split: The split of a folder or a data set that has several.

    Returns:
        The data set, with whatever columns it has.

    Raises:
        ColumnError: If nothing is there, if it is empty, or if it cannot be read.
        MissingDependencyError: If `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "Reading data needs `datasets`, which is not installed. "
            "Write: pip install 'hf-neat-packing[datasets]'"
        ) from error
    path = Path(source).expanduser()
    if path.is_file():
        dataset = _load_file(path)
    elif path.is_dir():
        dataset = _load_folder(path)
    elif _looks_like_path(source):
        raise ColumnError(f"There is no file or folder {source!r}. Accepted: {_ACCEPTED}.")
    else:
        dataset = _load_id(source)
    if isinstance(dataset, datasets.DatasetDict):
        dataset = _choose_split(dataset, split, source)
    if not len(dataset):
        raise ColumnError(f"{source} holds no document, so there is nothing to pack.")
    return dataset


def _looks_like_path(source: str) -> bool:
    """Tell a path that is not there from an id: an id is `name` or `owner/name`."""
    return (
        Path(source).suffix.lower() in _READERS
        or source.startswith((".", "~", "/"))
        or source.count("/") > 1
        or "\\" in source
    )


def _load_file(path: Path) -> Any:
    import datasets

    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ColumnError(
            f"{path} ends in {path.suffix or 'nothing'!r}, which is not known to hold documents. "
            f"Accepted: {_ACCEPTED}."
        )
    if not path.stat().st_size:
        raise ColumnError(f"{path} is empty (0 bytes), so there is nothing to pack.")
    options = {"sample_by": "paragraph"} if reader == "text" and _has_blank_line(path) else {}
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, UnicodeDecodeError) as error:
        reason = _bad_line(path) if reader == "json" else None
        raise ColumnError(
            f"{path} cannot be read as {reader}: {reason or _cause(error)}"
        ) from error


def _load_folder(path: Path) -> Any:
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path))
    except (
        datasets.exceptions.DatasetGenerationError,
        datasets.exceptions.DataFilesNotFoundError,
        FileNotFoundError,
        ValueError,
    ) as error:
        raise ColumnError(
            f"The folder {path} cannot be read as a data set: {_cause(error)}. Accepted: {_ACCEPTED}."
        ) from error


def _load_id(source: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source)
    except (datasets.exceptions.DatasetNotFoundError, OSError, ValueError) as error:
        raise ColumnError(
            f"There is no file or folder {source!r}, and no data set of this id could be loaded "
            f"({type(error).__name__}: {_cause(error)}). Check the spelling, and the connection if "
            f"it is on the Hub. Accepted: {_ACCEPTED}."
        ) from error


def _choose_split(dataset: Any, split: str, source: str) -> Any:
    if split in dataset:
        return dataset[split]
    if len(dataset) == 1:
        return next(iter(dataset.values()))
    raise ColumnError(
        f"{source} has no split {split!r}; it has {', '.join(dataset)}. "
        f"Write: --split {next(iter(dataset))}"
    )


def _has_blank_line(path: Path) -> bool:
    with path.open("rb") as file:
        return any(not line.strip() for line in file)


def _bad_line(path: Path) -> str | None:
    """Find the first line that is no JSON object."""
    if path.suffix.lower() != ".jsonl":
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is no JSON object. Accepted: one object a line."
            except ValueError as error:
                return f"line {number} is no JSON ({error}). Accepted: one object a line."
    return None


def _cause(error: BaseException) -> str:
    """Give the first line of what went wrong underneath."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


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
    raise ColumnError(
        f"No column is known to hold the documents: there is no {TOKEN_COLUMN!r} and no 'text' "
        f"among {', '.join(columns)}. Write --text-column with one of: "
        f"{', '.join(strings) or 'none of them holds text'}."
    )


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder, a `tokenizer.json` or an id.

    Raises:
        ColumnError: If there is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ColumnError(
            f"No tokenizer could be loaded from {name!r} ({_cause(error)}). Accepted: a folder that "
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
