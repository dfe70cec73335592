"""A Trainer whose batches are picked by a sampler of packs."""

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from hf_neat_packing.dataset.packed_dataset import PackedDataset
from hf_neat_packing.dataset.samplers import RankBalancedPackSampler
from hf_neat_packing.errors import MissingDependencyError

if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:
    # A mixin: the Trainer comes from the class that it is mixed into.
    _Host = object


class PackedTrainerMixin(_Host):  # type: ignore[misc]  # transformers is not typed here
    """Give a `Trainer` the batch samplers of this module.

    Put it before the `Trainer` among the bases. A `PackedDataset` is then read in a rank-balanced
    order; override `get_train_batch_sampler` for any other `batch_sampler` that is already one
    rank's share, such as `TokenBudgetBatchSampler` over documents.

    Example:
        >>> from transformers import Trainer
        >>> class PackedTrainer(PackedTrainerMixin, Trainer):
        ...     pass
    """

    def get_train_batch_sampler(self) -> Sampler[list[int]] | None:
        """Return this rank's `batch_sampler` for training, or None for the Trainer's own."""
        dataset, args = self.train_dataset, self.args
        if not isinstance(dataset, PackedDataset):
            return None
        config = getattr(self.model, "config", None)
        return RankBalancedPackSampler(
            dataset,
            num_ranks=args.world_size,
            rank=args.process_index,
            batch_size=args.train_batch_size,
            batches_per_update=args.gradient_accumulation_steps,
            hidden_size=getattr(config, "hidden_size", 2048),
            drop_last=args.dataloader_drop_last,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def get_train_dataloader(self) -> "DataLoader[Any]":
        """Return the training loader: the Trainer's own, but for who picks the batches."""
        loader: DataLoader[Any] = super().get_train_dataloader()
        sampler = self.get_train_batch_sampler()
        if sampler is None:
            return loader
        try:
            from accelerate.data_loader import prepare_data_loader
        except ImportError as error:
            raise MissingDependencyError(
                "The Trainer needs accelerate. Write: pip install 'hf-neat-packing[trainer]'"
            ) from error
        kept = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor")
        more = ("persistent_workers", "multiprocessing_context", "timeout")
        keywords = {name: getattr(loader, name) for name in (*kept, *more)}
        picked = DataLoader(loader.dataset, batch_sampler=sampler, **keywords)
        # The sampler gives this rank's batches already: to the loader this is the only process.
        prepared: DataLoader[Any] = prepare_data_loader(
            picked,
            device=self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.accelerator.device_placement,
            dispatch_batches=False,
            even_batches=False,
            non_blocking=self.accelerator.non_blocking,
        )
        return prepared
