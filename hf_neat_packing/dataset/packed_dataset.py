"""The packed view: packs of a data set, sliced out of it when they are read."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset

from hf_neat_packing.columns import ColumnRule
from hf_neat_packing.errors import ColumnError
from hf_neat_packing.planning import (
    OnEmpty,
    OnOverlong,
    PackingPlan,
    PackingReport,
    Strategy,
    TruncateSide,
    plan_packing,
)

if TYPE_CHECKING:
    import datasets

Pack = dict[str, list[Any]]

# What people call on a `datasets.Dataset`; on a view each would drop the plan or read every pack.
_DATASET_METHODS = frozenset(
    {
        *("add_column", "add_item", "batch", "cast", "cast_column", "filter", "flatten", "iter"),
        *("flatten_indices", "map", "push_to_hub", "remove_columns", "rename_column"),
        *("rename_columns", "select", "select_columns", "set_format", "set_transform", "shard"),
        *("shuffle", "skip", "sort", "take", "to_csv", "to_iterable_dataset", "to_json"),
        *("to_pandas", "train_test_split", "unique", "with_format", "with_transform"),
    }
)


class RepeatedPack(int):
    """Index of a pack that an epoch has given before, to fill the last step of all ranks.

    A `PackedDataset` gives such a pack without labels: it is in no loss twice.
    """


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """The arguments of `plan_packing` that a view keeps, so that it can plan another epoch."""

    max_length: int
    strategy: Strategy = "best_fit"
    on_overlong: OnOverlong = "error"
    truncate_side: TruncateSide = "right"
    min_length: int = 0
    on_empty: OnEmpty = "drop"
    seed: int | None = 0

    def plan(self, lengths: NDArray[np.int64], *, epoch: int = 0) -> PackingPlan:
        """Plan packs for documents of these lengths, `[documents]`, with `seed + epoch`."""
        seed = None if self.seed is None else self.seed + epoch
        keywords: dict[str, Any] = {**vars(self), "seed": seed}
        return plan_packing(lengths, keywords.pop("max_length"), **keywords)


class PackedDataset(TorchDataset[Pack]):
    """Show a data set as packs, sliced out of it when they are read.

    `view[i]` is a dict of nested columns. A token column gives one 1-D array per document, in the
    stored dtype: a read-only view of the table's memory. A document or media column gives one
    value per document, as `datasets` decodes it. Works in a `DataLoader` with any number of
    workers and in the `Trainer`; a pickle holds the plan, and of a memory-mapped set only its
    paths.

    There is no `set_epoch` on purpose: a new plan may have another number of packs, and a loader
    that has counted them would miss some. `with_epoch` gives the next epoch's packs as a new view.

    Args:
        dataset: A tokenized `datasets.Dataset`, one document per row.
        arguments: How to plan.
        columns: Rules by column name, for names that the defaults do not know.
        epoch: Added to the seed.

    Attributes:
        plan: The `PackingPlan`.
        documents: The `DocumentTable` that packs are sliced out of.
    """

    def __init__(
        self,
        dataset: "datasets.Dataset",
        arguments: PlanArguments,
        *,
        columns: Mapping[str, ColumnRule | str] | None = None,
        epoch: int = 0,
    ) -> None:
        from hf_neat_packing.dataset.document_table import DocumentTable

        self.documents = DocumentTable(dataset, columns)
        self._arguments = arguments
        lengths = self.documents.lengths()
        self.plan = arguments.plan(lengths, epoch=epoch)
        self._refuse_cut_media(lengths)

    def _refuse_cut_media(self, lengths: NDArray[np.int64]) -> None:
        """Raise if the plan cuts a document with media: placeholders would lose their pixels."""
        policy = self._arguments.on_overlong
        if policy not in ("truncate", "split"):
            return
        whole = self.plan.lengths == lengths[self.plan.indices]
        if whole.all() or not any(rule.kind == "media" for rule in self.rules.values()):
            return
        for document in np.unique(self.plan.indices[~whole]).tolist():
            name = self.documents.has_media(document)
            if name is not None:
                raise ColumnError(
                    f"Document {document} has {int(lengths[document])} tokens and media in "
                    f"{name!r}, and on_overlong={policy!r} would cut it at "
                    f"{self._arguments.max_length}: placeholders would lose their pixels, or the "
                    "reverse. Accepted for documents with media: on_overlong='drop' or 'error', or "
                    "a larger max_length."
                )

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, pack: int) -> Pack:
        index = operator.index(pack)
        size = len(self.plan)
        if not -size <= index < size:
            raise IndexError(f"Pack {index} of a packed set with {size} packs.")
        index %= size
        found = self.read(int(self.plan.offsets[index]), int(self.plan.offsets[index + 1]))
        return _without_labels(found) if isinstance(pack, RepeatedPack) else found

    def __getitems__(self, packs: Sequence[int]) -> list[Pack]:
        found = [self[pack] for pack in packs]
        if any("labels" in pack for pack in found):
            # Only a repeated pack can bring labels that the others lack: a batch has them or not.
            for pack in found:
                pack.setdefault("labels", pack.get("input_ids", []))
        return found

    def __iter__(self) -> Iterator[Pack]:
        return (self[pack] for pack in range(len(self)))

    def read(self, first: int, last: int) -> Pack:
        """Slice the pieces `first` to `last` of the plan out of every column.

        Args:
            first: Index of the first piece, in the order of `plan.indices`.
            last: One past the last piece.

        Returns:
            For each column a list with one value per piece.
        """
        plan = self.plan
        lengths = plan.lengths[first:last].tolist()
        starts = [0] * len(lengths) if plan.starts is None else plan.starts[first:last].tolist()
        return self.documents.read(plan.indices[first:last], starts, lengths)

    @property
    def rules(self) -> dict[str, ColumnRule]:
        """The `ColumnRule` of each column."""
        return self.documents.rules

    @property
    def dataset(self) -> "datasets.Dataset":
        """The data set under the view, one document per row."""
        return self.documents.dataset

    @property
    def report(self) -> PackingReport:
        """The `PackingReport`: what was kept, cut, split and dropped, and how full packs are."""
        return self.plan.report

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of a pack."""
        return [name for name, rule in self.rules.items() if rule.kind != "ignore"]

    @property
    def features(self) -> "datasets.Features":
        """The `datasets.Features` of the nested columns, as `materialize` writes them."""
        from hf_neat_packing.dataset.materialize import nested_features

        return nested_features(self.documents.features, self.rules)

    def with_epoch(self, epoch: int) -> "PackedDataset":
        """Return a view of the same documents planned with `seed + epoch`."""
        return PackedDataset(self.dataset, self._arguments, columns=self.rules, epoch=epoch)

    def materialize(
        self, *, num_proc: int | None = None, keep_in_memory: bool | None = None
    ) -> "datasets.Dataset":
        """Write the packs as a real `datasets.Dataset` with nested columns.

        A set that is in memory gives one in memory; one with files on disk gives one in a cache
        file beside them, which is used again as long as the data and the plan are the same.

        Args:
            num_proc: Threads that gather documents.
            keep_in_memory: Decide against that: True is faster, False needs the least memory.

        Returns:
            A data set with one row per pack.
        """
        from hf_neat_packing.dataset.materialize import materialize

        return materialize(self, num_proc=num_proc, keep_in_memory=keep_in_memory)

    def save_to_disk(self, path: str | Path, *, num_proc: int | None = None) -> None:
        """Write the packs as a folder for `datasets.load_from_disk`, with the report beside them.

        Args:
            path: The folder; the report is `packing_report.json` in it.
            num_proc: Processes that write, and threads that gather.
        """
        self.materialize(num_proc=num_proc).save_to_disk(str(path), num_proc=num_proc)
        self.report.save(Path(path) / "packing_report.json")

    def to_parquet(self, path: str | Path, *, num_proc: int | None = None) -> None:
        """Write the packs as one parquet file, with the report beside it.

        Args:
            path: The file; the report is the same name with the ending `.report.json`.
            num_proc: Threads that gather documents.
        """
        from hf_neat_packing.dataset.materialize import write_parquet

        write_parquet(self, Path(path), num_proc=num_proc)
        self.report.save(Path(path).with_suffix(".report.json"))

    def __getattr__(self, name: str) -> Any:
        if name in _DATASET_METHODS:
            raise AttributeError(
                f"A PackedDataset is a view over documents and has no {name!r}: it would have to "
                "drop the plan or read every pack. Write it on the data set before packing "
                f"(pack_dataset(dataset.{name}(...), max_length=...)), or make a real "
                f"datasets.Dataset of the packs first: view.materialize().{name}(...)."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"PackedDataset(packs={len(self)}, documents={self.dataset.num_rows}, "
            f"max_length={self._arguments.max_length}, columns={self.column_names})"
        )


def _without_labels(pack: Pack) -> Pack:
    """Give every token, or every document of a classification set, the label that losses ignore."""
    scalar = "labels" in pack and not hasattr(pack["labels"][0], "__len__")
    tokens = pack["input_ids"] if "input_ids" in pack else next(iter(pack.values()))
    ignored = [-100 if scalar else np.full(len(ids), -100, dtype=np.int64) for ids in tokens]
    shifted = {"shift_labels": ignored} if "shift_labels" in pack else {}
    return {**pack, "labels": ignored, **shifted}
