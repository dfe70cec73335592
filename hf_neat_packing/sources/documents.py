"""Find documents: in a file, in a folder or by a data set's id."""

import json
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
_COMPRESSED = frozenset({".gz", ".xz", ".bz2", ".zst"})
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
        _suffix(Path(source)) in _READERS
        or source.startswith((".", "~", "/"))
        or source.count("/") > 1
        or "\\" in source
    )


def _suffix(path: Path) -> str:
    """Give the ending that tells the format, under one that tells of compression."""
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def _load_file(path: Path) -> Any:
    import datasets

    reader = _READERS.get(_suffix(path))
    if reader is None:
        raise ColumnError(
            f"{path} ends in {path.suffix or 'nothing'!r}, which is not known to hold documents. "
            f"Accepted: {_ACCEPTED}."
        )
    if not path.stat().st_size:
        raise ColumnError(f"{path} is empty (0 bytes), so there is nothing to pack.")
    options = {}
    if reader == "text" and path.suffix.lower() == ".txt":
        options = _text_options(path)
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, UnicodeDecodeError) as error:
        reason = _bad_line(path) if reader == "json" else None
        raise ColumnError(
            f"{path} cannot be read as {reader}: {reason or first_line_of_cause(error)}"
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
            f"The folder {path} cannot be read as a data set: {first_line_of_cause(error)}. Accepted: {_ACCEPTED}."
        ) from error


def _load_id(source: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source)
    except (datasets.exceptions.DatasetNotFoundError, OSError, ValueError) as error:
        raise ColumnError(
            f"There is no file or folder {source!r}, and no data set of this id could be loaded "
            f"({type(error).__name__}: {first_line_of_cause(error)}). Check the spelling, and the connection if "
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


def _text_options(path: Path) -> dict[str, str]:
    """Tell whether blank lines separate documents, or every line is one."""
    with path.open("rb") as file:
        blank = [not line.strip() for line in file]
    if all(blank):
        raise ColumnError(f"{path} holds blank lines only, so there is nothing to pack.")
    return {"sample_by": "paragraph"} if any(blank) else {}


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


def first_line_of_cause(error: BaseException) -> str:
    """Give the first line of what went wrong underneath an error.

    Args:
        error: What was raised; its innermost cause is read.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
