"""`pack_shards`: a Ray Data pipeline from tokenized parquet to packed parquet."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_neat_packing import errors
from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.errors import ColumnError, MissingDependencyError
from hf_neat_packing.planning import OnEmpty, OnOverlong, Strategy, TruncateSide, plan_packing

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_neat_packing.shards.folder import PackFolder
    from hf_neat_packing.shards.parts import Part

Shards = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SUMMED = (
    *("packs", "documents", "documents_kept", "documents_cut", "documents_split"),
    *("documents_dropped", "tokens", "tokens_kept", "tokens_cut", "tokens_dropped"),
)


@dataclass(frozen=True, kw_only=True)
class PackedShards:
    """Say what `pack_shards` has written.

    Attributes:
        folder: The folder, for `datasets.load_dataset`.
        files: Its parquet files, in order.
        max_length: The most tokens in a pack.
        packs: Packs in all files.
        documents: Documents in the shards.
        documents_kept: Documents in a pack, whole, cut or split.
        documents_cut: Kept documents that lost tokens to truncation.
        documents_split: Kept documents that became several pieces.
        documents_dropped: Documents in no pack.
        tokens: Tokens in the shards.
        tokens_kept: Tokens in a pack.
        tokens_cut: Tokens lost to truncation.
        tokens_dropped: Tokens of dropped documents.
        reused: Files that an earlier run had finished.
    """

    folder: Path
    files: tuple[Path, ...]
    max_length: int
    packs: int
    documents: int
    documents_kept: int
    documents_cut: int
    documents_split: int
    documents_dropped: int
    tokens: int
    tokens_kept: int
    tokens_cut: int
    tokens_dropped: int
    reused: int

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds tokens, 0 to 1."""
        return self.tokens_kept / (self.packs * self.max_length) if self.packs else 0.0

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents ({self.documents_dropped:,} dropped, {self.documents_cut:,} cut, "
            f"{self.documents_split:,} split) in {self.packs:,} packs of {self.max_length:,} tokens, "
            f"{self.fill:.2%} full, in {len(self.files):,} files ({self.reused:,} from an earlier run) in {self.folder}"
        )


def pack_shards(
    shards: Shards,
    output: str | os.PathLike[str],
    *,
    max_length: int,
    strategy: Strategy = "best_fit",
    on_overlong: OnOverlong = "error",
    truncate_side: TruncateSide = "right",
    min_length: int = 0,
    on_empty: OnEmpty = "drop",
    seed: int | None = 0,
    columns: Mapping[str, ColumnRule | str] | None = None,
    split: str = "train",
    tokens_per_file: int = 2**24,
    num_workers: int | None = None,
    max_retries: int = 3,
    force: bool = False,
) -> PackedShards:
    """Pack tokenized parquet shards on Ray workers, every document once.

    Shards are divided at their row groups into parts, and a worker packs each part by itself into
    one file, with the plan that `pack_dataset` makes for these documents: the files do not depend
    on how many workers there are. Documents meet only documents of their part, so shuffle them
    over the shards before, if they are sorted.

    A part whose worker died is done again by another. A run that was killed is gone on with by
    the same call: finished parts are kept, the others are done, and no document is lost or
    doubled. Until all are there, the folder is called `<output>.unfinished`. One run at a time.

    Args:
        shards: Parquet files, or a folder of them: one document per row, token columns of lists.
            Every worker must be able to read them by the same path.
        output: A new folder, which every worker can write to; read it with
            `datasets.load_dataset(output)`. A rename on its file system must be atomic.
        max_length: The most tokens in a pack.
        strategy: As in `plan_packing`.
        on_overlong: What becomes of a document longer than `max_length`: `error`, `truncate`,
            `split` or `drop`.
        truncate_side: The side that `truncate` cuts, `right` or `left`.
        min_length: Documents with fewer tokens are dropped, and counted.
        on_empty: `drop` (and count) empty documents, or `error`.
        seed: Seeds the order of documents and packs inside each part; None keeps the order.
        columns: Rules by column name, for names that the defaults do not know.
        split: First word of the file names, by which `datasets` tells splits.
        tokens_per_file: A part ends with the row group that reaches so many tokens; a worker holds
            one part in memory, some ten bytes a token.
        num_workers: Parts that are packed at once; None leaves it to Ray.
        max_retries: How often a part whose worker died is done again before the run is an error.
        force: Replace the packs of an earlier run, and throw away unfinished ones of another.

    Returns:
        What was written, counted; `_packing.json` in the folder says the same.

    Raises:
        ColumnError: If shards or folder are not as said above, or documents cannot be packed.
        PlanningError: If a document is too long and `on_overlong="error"`, or an option is wrong.
        MissingDependencyError: If Ray is not installed.
    """
    ray_data = _import_ray_data()
    from hf_neat_packing.shards.folder import PackFolder
    from hf_neat_packing.shards.parts import divide, list_shards, schema_of

    if tokens_per_file < 1 or not split.isidentifier():
        raise ColumnError(
            f"tokens_per_file={tokens_per_file}, split={split!r}; give at least 1 token, and a split "
            "that is one word, such as 'train'."
        )
    policy: dict[str, Any] = {
        "max_length": max_length,
        "strategy": strategy,
        "on_overlong": on_overlong,
        "truncate_side": truncate_side,
        "min_length": min_length,
        "on_empty": on_empty,
        "seed": seed,
    }
    plan_packing([], **policy)  # wrong options are an error here and not in a worker
    target = Path(output).expanduser().resolve()
    paths = list_shards(shards, target)
    parts, digest = divide(paths, tokens_per_file)
    folder = PackFolder(target, split, len(parts))
    rules = sorted((name, str(rule)) for name, rule in (columns or {}).items())
    folder.claim(repr((digest, tokens_per_file, split, policy, rules)), force=force)
    left = [part.number for part in parts if folder.finished(part.number) is None]
    if left:
        results = ray_data.from_items(
            [{"part": number} for number in left], override_num_blocks=len(left)
        ).map(
            _pack_part,
            fn_kwargs={
                "parts": parts,
                "folder": folder,
                "schema": schema_of(paths[0]),
                "options": {**policy, "columns": dict(columns or {})},
                "max_retries": max_retries,
            },
            concurrency=num_workers,
        )
        for result in results.iter_rows():
            if result["error"]:
                raise getattr(errors, result["error"])(result["message"])
    return _complete(folder, parts, reused=len(parts) - len(left), max_length=max_length)


def _import_ray_data() -> Any:
    """Import Ray Data, or say how to install it."""
    try:
        import ray.data
    except ImportError as error:
        raise MissingDependencyError(
            "pack_shards runs on Ray Data, and `ray` is not installed. "
            "Write: pip install 'hf-neat-packing[ray]'"
        ) from error
    return ray.data


def _pack_part(
    row: dict[str, Any],
    *,
    parts: "Sequence[Part]",
    folder: "PackFolder",
    schema: "pa.Schema",
    options: dict[str, Any],
    max_retries: int,
) -> dict[str, Any]:
    """Pack one part, in a worker: the same call gives the same file, so it may be done again."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    from hf_neat_packing.dataset import pack_dataset
    from hf_neat_packing.dataset.materialize import write_parquet
    from hf_neat_packing.shards.parts import read_documents

    part = parts[int(row["part"])]
    if folder.finished(part.number) is None:
        try:
            # Ray does a task again as often as its worker dies, however often that is.
            folder.begin(part.number, max_retries=max_retries)
            documents = Dataset(InMemoryTable(read_documents(part, schema)))
            view = pack_dataset(documents, **options)
            written = folder.unfinished_file(part.number)
            write_parquet(view, written)
        except errors.NeatPackingError as error:
            # Ray would wrap it in an error of its own; the driver raises it under its name.
            return {"error": type(error).__name__, "message": f"{part}: {error}"}
        folder.finish(part.number, written, view.report.to_dict())
    return {"error": "", "message": ""}


def _complete(
    folder: "PackFolder", parts: "Sequence[Part]", *, reused: int, max_length: int
) -> PackedShards:
    """Count what all parts have, and give the folder its name."""
    reports = [folder.finished(part.number) for part in parts]
    totals = dict.fromkeys(_SUMMED, 0)
    for part, report in zip(parts, reports, strict=True):
        assert report is not None, f"part {part.number} was packed and is not there"
        assert report["documents"] == part.documents, "every document is counted once"
        for name in _SUMMED:
            totals[name] += report[name]
    found = PackedShards(
        folder=folder.output,
        files=tuple(folder.output / folder.file_name(part.number) for part in parts),
        max_length=max_length,
        reused=reused,
        **totals,
    )
    summary = {
        **asdict(found),
        "files": [str(path.relative_to(found.folder)) for path in found.files],
        "fill": found.fill,
    }
    folder.complete({name: value for name, value in summary.items() if name != "folder"})
    return found
