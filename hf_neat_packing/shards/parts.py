"""Which row groups of which shards one worker packs into one file: read from footers, no token touched."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hf_neat_packing.errors import ColumnError


@dataclass(frozen=True)
class Source:
    """Consecutive row groups of one shard.

    Attributes:
        path: The shard.
        first: The first row group.
        last: One past the last.
        documents: Rows in them.
    """

    path: str
    first: int
    last: int
    documents: int

    def __str__(self) -> str:
        return f"{self.path} (row groups {self.first} to {self.last - 1})"


@dataclass(frozen=True)
class Part:
    """What one worker packs into one file.

    Attributes:
        number: Its place among the parts.
        sources: Where its documents are, in order.
    """

    number: int
    sources: tuple[Source, ...]

    @property
    def documents(self) -> int:
        """Documents in the part."""
        return sum(source.documents for source in self.sources)

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))


def list_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], output: Path
) -> list[Path]:
    """List the shards: the files that are given, or all parquet files of a folder by name.

    Args:
        shards: A folder, a file, or files.
        output: Where the packs will go, absolute.

    Returns:
        Absolute paths, in order.

    Raises:
        ColumnError: If there is none, if one is not there, if one is given twice, or if the output
            is among them.
    """
    if isinstance(shards, str | os.PathLike):
        given = Path(shards).expanduser().resolve()
        if output.is_relative_to(given):
            raise ColumnError(
                f"The packs would go to {output}, inside the folder of the shards, and be packed again with them. Give "
                "an output outside of it."
            )
        found = sorted(given.rglob("*.parquet")) if given.is_dir() else [given]
    else:
        found = [Path(shard) for shard in shards]
    paths = [path.expanduser().resolve() for path in found]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise ColumnError(
            f"{'No such file: ' + missing[0] if missing else f'No *.parquet in {shards}'}, so documents would be "
            "missing in the packs. Accepted: a folder with parquet files, or a list of parquet files."
        )
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ColumnError(
            f"The shard {twice} is given twice, so its documents would be packed twice. Give each "
            "shard once."
        )
    return paths


def divide(paths: Sequence[Path], tokens_per_file: int) -> tuple[list[Part], str]:
    """Divide shards into parts of about so many tokens, at row groups.

    Args:
        paths: The shards.
        tokens_per_file: A part ends with the row group that reaches this.

    Returns:
        The parts, and a digest of what was divided: it changes whenever a shard does.

    Raises:
        ColumnError: If a file is no parquet, or no file has a document.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts: list[Part] = []
    sources: list[Source] = []
    tokens = 0
    for path in paths:
        footer = _footer(path)
        status = path.stat()
        digest.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
        first = 0
        for group, documents, size in _row_groups(footer):
            tokens += size
            if tokens >= tokens_per_file or group + 1 == footer.num_row_groups:
                rows = documents + sum(footer.row_group(g).num_rows for g in range(first, group))
                sources.append(Source(str(path), first, group + 1, rows))
                first = group + 1
            if tokens >= tokens_per_file:
                parts.append(Part(len(parts), tuple(sources)))
                sources, tokens = [], 0
    if sources:
        parts.append(Part(len(parts), tuple(sources)))
    if not any(part.documents for part in parts):
        raise ColumnError(
            f"The {len(paths)} shards hold no document, so there is nothing to pack. Check the paths."
        )
    return parts, digest.hexdigest()


def read_documents(part: Part, schema: pa.Schema) -> pa.Table:
    """Read the documents of a part.

    Args:
        part: The part.
        schema: Of the first shard; the others are brought to it.

    Returns:
        One row per document.

    Raises:
        ColumnError: If a shard has other columns, or has changed since it was divided.
    """
    tables = []
    for source in part.sources:
        with pq.ParquetFile(source.path) as file:
            groups = range(source.first, min(source.last, file.num_row_groups))
            table = file.read_row_groups(list(groups))
        if table.num_rows != source.documents:
            raise ColumnError(
                f"{source} has {table.num_rows} documents and had {source.documents} when the work was divided. "
                "Packs of a file that changes would lose or double documents. Write shards first, pack then."
            )
        tables.append(_cast(table, schema, source))
    return pa.concat_tables(tables) if tables else schema.empty_table()


def schema_of(path: Path) -> pa.Schema:
    """Read the columns of a shard."""
    return pq.read_schema(path)


def _footer(path: Path) -> Any:
    try:
        return pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise ColumnError(
            f"{path} is no parquet file: {str(error).splitlines()[0]} Accepted: parquet with one document per row and "
            "its tokens in a column of lists, such as input_ids."
        ) from error


def _row_groups(footer: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each row group, its documents and its tokens."""
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        # The leaf with the most values is the flat tokens of a list column.
        tokens = max((group.column(i).num_values for i in range(group.num_columns)), default=0)
        yield number, group.num_rows, tokens


def _cast(table: pa.Table, schema: pa.Schema, source: Source) -> pa.Table:
    if set(table.column_names) != set(schema.names):
        raise ColumnError(
            f"{source} has the columns {sorted(table.column_names)} and the first shard {sorted(schema.names)}. Packs "
            "with a column in some rows only cannot be read together. Give all shards the same columns."
        )
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ColumnError(
            f"{source} does not fit the types of the first shard: {str(error).splitlines()[0]} Give all shards the "
            "same types."
        ) from error
