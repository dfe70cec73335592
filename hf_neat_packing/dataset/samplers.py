"""Batch samplers for packs: a token budget over documents, and an order that keeps ranks in step.

Both are `batch_sampler`s for a plain `DataLoader`. Every rank computes the same plan and takes its
own share, so there is no communication, all ranks have the same number of batches, and `len()` is
exact before the first batch and the same in every epoch.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from hf_neat_packing.dataset.packed_dataset import PackedDataset, RepeatedPack
from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import (
    OnOverlong,
    PackingPlan,
    Strategy,
    balanced_order,
    pack_costs,
    plan_packing,
)

Batch = list[int]


class _RankSampler(Sampler[Batch]):
    """Deal batches to ranks, epoch by epoch, and remember how many were given.

    Attributes:
        batch_size: None, or the packs in every batch.
        repeats: Indices that the current epoch gives a second time, on any rank.
        dropped: Indices that the current epoch leaves out, on every rank.
    """

    batch_size: int | None = None

    def __init__(self, num_ranks: int, rank: int, seed: int) -> None:
        if num_ranks < 1 or not 0 <= rank < num_ranks:
            raise PlanningError(
                f"rank={rank} of num_ranks={num_ranks}; ranks count from 0. Write e.g. "
                "num_ranks=torch.distributed.get_world_size(), rank=torch.distributed.get_rank()."
            )
        self.num_ranks, self.rank, self.seed = num_ranks, rank, seed
        self.repeats: Batch = []
        self.dropped: Batch = []
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch, with `seed + epoch`; call it on every rank before iterating."""
        self.epoch = int(epoch)
        self._batches = self._plan_epoch()
        self._given = self._first = 0
        if not self._batches:
            raise PlanningError(
                f"There are fewer packs than the {self.num_ranks} ranks need for one batch each. "
                "Accepted: more documents, a smaller max_length, fewer ranks, or drop_last=False."
            )

    def _plan_epoch(self) -> Sequence[Batch]:
        """Return this rank's batches of `self.epoch`, and set `repeats` and `dropped`."""
        raise AssertionError("a subclass says how its epochs are planned")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        first, self._first = self._first, 0
        for position in range(first, len(self._batches)):
            self._given = position + 1
            yield self._batches[position]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many batches of it were given.

        A loader with workers asks for batches before they are used: count those that were used,
        or let `StatefulDataLoader` or the `Trainer` do so.
        """
        return {"settings": self._settings(), "epoch": self.epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the next iteration where the sampler that gave `state` stood.

        Raises:
            PlanningError: If the state is of a sampler with other settings or other lengths.
        """
        if state["settings"] != self._settings():
            raise PlanningError(
                f"The state is of a sampler with {state['settings']} and this one has "
                f"{self._settings()}; its batches would not be the same. Accepted: the settings "
                "of the state. Build the sampler with them."
            )
        self.set_epoch(state["epoch"])
        self._given = self._first = int(state["batches"])

    def _settings(self) -> dict[str, Any]:
        """Return what decides the batches."""
        return {"num_ranks": self.num_ranks, "seed": self.seed, "batches": len(self)}


class TokenBudgetBatchSampler(_RankSampler):
    """Batch documents of a map-style data set by tokens, with a new plan for each epoch.

    A batch is one pack: the documents whose tokens fill `max_length`. To give every rank the same
    number of batches, in every epoch, packs of several documents are divided; only where that is
    not enough are packs repeated (`repeats`) or, with `drop_last`, left out (`dropped`).

    Args:
        lengths: Tokens of each document, `[documents]`.
        max_length: The most tokens in a batch.
        strategy: As in `plan_packing`.
        on_overlong: `error`, or `drop`; a sampler gives whole documents, so it cannot cut them.
        num_ranks: Ranks that train together.
        rank: This one.
        drop_last: Leave packs out rather than repeat some.
        seed: Of the first epoch's plan.

    Example:
        >>> sampler = TokenBudgetBatchSampler([5, 3, 6, 2], 8, strategy="sequential")
        >>> list(sampler)
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        max_length: int,
        *,
        strategy: Strategy = "best_fit",
        on_overlong: OnOverlong = "error",
        num_ranks: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if on_overlong not in ("error", "drop"):
            raise PlanningError(
                f"on_overlong={on_overlong!r}: a sampler picks whole documents and cannot cut "
                "them. Accepted: 'error', 'drop'. Write pack_dataset(dataset, max_length=..., "
                f"on_overlong={on_overlong!r}) for packs of cut documents."
            )
        self._lengths = np.asarray(lengths)
        self._arguments: dict[str, Any] = {"strategy": strategy, "on_overlong": on_overlong}
        self.max_length = max_length
        self.drop_last = drop_last
        self._steps: int | None = None
        super().__init__(num_ranks, rank, seed)

    def _plan(self, **changes: Any) -> PackingPlan:
        """Plan the current epoch."""
        keywords = {**self._arguments, "seed": self.seed + self.epoch, **changes}
        return plan_packing(self._lengths, self.max_length, **keywords)

    def _plan_epoch(self) -> Sequence[Batch]:
        plan = self._plan()
        if self._steps is None:
            # Best-fit decreasing has as many packs for any seed, so every epoch can do with these.
            self._most = max(len(plan), len(self._plan(strategy="bfd")))
            up = -(-self._most // self.num_ranks)
            enough = len(plan.indices) >= up * self.num_ranks
            self._steps = up if enough or not self.drop_last else self._most // self.num_ranks
        indices, offsets = self._at_most(plan, self._most)
        wanted = self._steps * self.num_ranks
        bounds = _divide(offsets, wanted)[: wanted + 1].tolist()
        packs: list[Batch] = [indices[a:b].tolist() for a, b in pairwise(bounds)]
        self.dropped = indices[bounds[-1] :].tolist()
        missing = wanted - len(packs) if packs else 0
        again: list[Batch] = [
            [RepeatedPack(document) for document in pack] for pack in islice(cycle(packs), missing)
        ]
        self.repeats = [document for pack in again for document in pack]
        return (packs + again)[self.rank :: self.num_ranks]

    def _at_most(self, plan: PackingPlan, most: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Plan the emptiest packs again, as few as will do, until there are at most `most`."""
        indices, offsets = plan.indices, plan.offsets
        emptiest = np.argsort(plan.pack_lengths, kind="stable")
        again = 16
        while len(offsets) - 1 > most:
            chosen = np.isin(np.arange(len(plan)), emptiest[:again])
            of_pack = np.repeat(chosen, np.diff(plan.offsets))
            loose = plan.indices[of_pack]
            dense = plan_packing(
                self._lengths[loose], self.max_length, strategy="bfd", seed=plan.seed
            )
            sizes = np.concatenate((np.diff(plan.offsets)[~chosen], np.diff(dense.offsets)))
            indices = np.concatenate((plan.indices[~of_pack], loose[dense.indices]))
            offsets = np.concatenate(([0], np.cumsum(sizes)))
            again *= 2
        return indices, offsets

    def _settings(self) -> dict[str, Any]:
        more = {"max_length": self.max_length, "documents": len(self._lengths), **self._arguments}
        return {**super()._settings(), **more, "drop_last": self.drop_last}


class RankBalancedPackSampler(_RankSampler):
    """Deal packs to ranks so that the ranks of a step have packs of like cost.

    Every optimizer step sees a random draw of packs; only which rank computes which is chosen, so
    less time is lost waiting for the slowest rank.

    Args:
        packs: A `PackedDataset`, or the cost of each pack, `[packs]`.
        num_ranks: Ranks that wait for one another.
        rank: This one.
        batch_size: Packs in a batch.
        batches_per_update: Batches that each rank computes for one optimizer step.
        hidden_size: Width of the model, which says how much attention adds to a pack's cost; for
            a `PackedDataset` only.
        drop_last: Leave out the packs that do not fill a last step (`dropped`, others in each
            epoch) rather than repeat some (`repeats`). A `PackedDataset` gives a repeated pack
            without labels, so that it is in no loss twice.
        seed: Of the first epoch's order.
    """

    def __init__(
        self,
        packs: PackedDataset | ArrayLike,
        *,
        num_ranks: int,
        rank: int,
        batch_size: int = 1,
        batches_per_update: int = 1,
        hidden_size: int = 2048,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(packs, PackedDataset):
            plan = packs.plan
            self.costs: NDArray[Any] = pack_costs(
                plan.lengths, plan.offsets, hidden_size=hidden_size
            )
        else:
            self.costs = np.asarray(packs)
        if batch_size < 1 or batches_per_update < 1:
            raise PlanningError(
                f"batch_size={batch_size}, batches_per_update={batches_per_update}; both are at "
                "least 1."
            )
        self.batch_size: int = batch_size
        self.batches_per_update = batches_per_update
        self.drop_last = drop_last
        super().__init__(num_ranks, rank, seed)

    def _plan_epoch(self) -> Sequence[Batch]:
        step = self.num_ranks * self.batch_size
        num = len(self.costs)
        drawn = np.random.default_rng(self.seed + self.epoch).permutation(num)
        whole, rest = drawn[: num // step * step], drawn[num // step * step :]
        balanced = balanced_order(
            self.costs[whole],
            self.num_ranks,
            steps_per_update=self.batch_size * self.batches_per_update,
            seed=None,
        )
        order = whole[balanced].tolist()
        self.repeats, self.dropped = [], []
        if self.drop_last:
            self.dropped = rest.tolist()
        elif len(rest):
            fill = np.resize(drawn, step - len(rest)).tolist()
            self.repeats = [RepeatedPack(pack) for pack in fill]
            order += rest.tolist() + self.repeats
        mine = order[self.rank :: self.num_ranks]
        return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "packs": len(self.costs),
            "batch_size": self.batch_size,
            "batches_per_update": self.batches_per_update,
            "drop_last": self.drop_last,
        }


def _divide(offsets: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Divide packs of several documents until there are `wanted`, as far as that goes.

    Args:
        offsets: `[packs + 1]`, into documents.
        wanted: Packs to reach; fewer than there are changes nothing.
    """
    missing = wanted - (len(offsets) - 1)
    if missing <= 0:
        return offsets
    # Any offset between two documents of a pack divides it; spread them over packs evenly.
    inside = np.setdiff1d(np.arange(offsets[0], offsets[-1]), offsets)
    if not len(inside):
        return offsets
    picked = inside[np.linspace(0, len(inside) - 1, min(missing, len(inside))).round().astype(int)]
    return np.union1d(offsets, picked)
