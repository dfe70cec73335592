"""Pack a data set as a view: the plan is a few integers per document, and nothing is copied.

`pack_dataset` reads document lengths from Arrow offsets, plans once, and gives a map-style data
set whose rows are packs. A pack is nested columns, one inner array per document, so boundaries
travel inside the data: no length column can go stale, and no column can be dropped without its
boundaries. The documents of a pack are sliced out of the (memory-mapped) table when it is read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.dataset.packed_dataset import Pack, PackedDataset, PlanArguments
from hf_neat_packing.errors import ColumnError, MissingDependencyError
from hf_neat_packing.planning import OnEmpty, OnOverlong, Strategy, TruncateSide

if TYPE_CHECKING:
    import datasets

__all__ = ["Pack", "PackedDataset", "nest_flat_packs", "pack_dataset"]


def pack_dataset(
    dataset: Any,
    *,
    max_length: int,
    strategy: Strategy = "best_fit",
    on_overlong: OnOverlong = "error",
    truncate_side: TruncateSide = "right",
    min_length: int = 0,
    on_empty: OnEmpty = "drop",
    seed: int | None = 0,
    columns: Mapping[str, ColumnRule | str] | None = None,
    materialize: bool = False,
    num_proc: int | None = None,
    buffer: int = 4096,
) -> Any:
    """Pack the documents of a data set into rows of at most `max_length` tokens.

    Args:
        dataset: A tokenized `datasets.Dataset` (one document per row), a `DatasetDict`, or an
            `IterableDataset`, which is packed as a stream.
        max_length: The most tokens in a pack.
        strategy: `best_fit`, `bfd` or `sequential`, as `plan_packing` explains them.
        on_overlong: What becomes of a document longer than `max_length`: `error`, `truncate`,
            `split` or `drop`. A split document becomes several, each attending to itself only.
        truncate_side: The side that `truncate` cuts, `right` or `left`.
        min_length: Documents with fewer tokens are dropped, and counted.
        on_empty: `drop` (and count) empty documents, or `error`.
        seed: Seeds the order of documents and packs; None keeps the order of arrival. A stream
            keeps its order: shuffle it before.
        columns: How columns are packed, by name: a `ColumnRule` or one of `token`, `document`,
            `media`, `ignore`. Needed for names that `DEFAULT_COLUMN_RULES` does not know.
        materialize: Write the packs as a real `datasets.Dataset` with nested columns, for hosts
            that insist on one, in place of the view.
        num_proc: Threads that gather documents when `materialize` writes them.
        buffer: Documents to read ahead of an `IterableDataset`.

    Returns:
        A `PackedDataset`; for a `DatasetDict` a dict of them; for an `IterableDataset` a
        `PackedStream`. With `materialize`, a `datasets.Dataset` or `DatasetDict`.

    Raises:
        ColumnError: If a column has no rule, is null somewhere, or disagrees with another on the
            length of a document; if the data set is packed already; if an image would be cut.
        PlanningError: If a document is too long and `on_overlong="error"`.
        MissingDependencyError: If `datasets` is not installed.
    """
    library = _import_datasets()
    arguments = PlanArguments(
        max_length=max_length,
        strategy=strategy,
        on_overlong=on_overlong,
        truncate_side=truncate_side,
        min_length=min_length,
        on_empty=on_empty,
        seed=seed,
    )
    if isinstance(dataset, (library.IterableDataset, library.IterableDatasetDict)):
        return _pack_streams(dataset, arguments, columns, materialize, buffer)

    def pack(split: "datasets.Dataset") -> Any:
        view = PackedDataset(split, arguments, columns=columns)
        return view.materialize(num_proc=num_proc) if materialize else view

    if isinstance(dataset, library.DatasetDict):
        packed = {name: pack(split) for name, split in dataset.items()}
        return library.DatasetDict(packed) if materialize else packed
    if not isinstance(dataset, library.Dataset):
        raise ColumnError(
            f"pack_dataset got a {type(dataset).__name__}, whose document lengths it cannot read "
            "without loading every document. Accepted: datasets.Dataset, DatasetDict and "
            "IterableDataset. Write datasets.Dataset.from_list(documents) for a list of dicts, or "
            "pack_stream(documents, max_length=...) for any iterable."
        )
    return pack(dataset)


def _import_datasets() -> Any:
    """Import `datasets`, or say how to install it."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "pack_dataset reads Hugging Face datasets, and `datasets` is not installed. "
            "Write: pip install 'hf-neat-packing[datasets]'"
        ) from error
    return datasets


def _pack_streams(
    dataset: Any,
    arguments: PlanArguments,
    columns: Mapping[str, ColumnRule | str] | None,
    materialize: bool,
    buffer: int,
) -> Any:
    """Pack an iterable data set, or each split of a dict of them, as a stream."""
    from hf_neat_packing.dataset.streams import pack_stream

    if materialize or arguments.strategy != "best_fit":
        raise ColumnError(
            "An IterableDataset has no length and is packed as it streams by: it can be neither "
            f"materialized nor planned by strategy={arguments.strategy!r}. Accepted: "
            "materialize=False, strategy='best_fit'. Load a datasets.Dataset for the others."
        )
    keywords = {"columns": columns, "buffer": buffer, **vars(arguments)}
    del keywords["strategy"], keywords["seed"]
    if isinstance(dataset, dict):
        return {name: pack_stream(split, **keywords) for name, split in dataset.items()}
    return pack_stream(dataset, **keywords)


def nest_flat_packs(
    dataset: "datasets.Dataset", *, columns: Mapping[str, ColumnRule | str] | None = None
) -> "datasets.Dataset":
    """Read an already packed flat data set as nested packs, once its boundaries are shown to agree.

    Args:
        dataset: One pack per row, with `input_ids` and `seq_lengths` (tokens of each document, as
            TRL stores them), or `position_ids` that restart at 0 in each document, or both.
        columns: Rules by column name, for names that the defaults do not know.

    Returns:
        The same packs with one inner list per document, sharing the memory of the tokens;
        `seq_lengths` and `position_ids` are left out, since the nesting says the same.

    Raises:
        BoundaryError: If lengths do not add up to the row, if positions do not restart as the
            lengths say, or if a row is padded.
        ColumnError: If there are no boundaries, or a column does not hold one value per token.
    """
    _import_datasets()
    from hf_neat_packing.dataset.flat_packs import nest_rows

    return nest_rows(dataset, columns)
