"""Train on packs with the real `transformers.Trainer`, its progress bar included."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_neat_packing.callback import PackingCallback
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.dataset.packed_dataset import PackedDataset
from hf_neat_packing.errors import MissingDependencyError


@dataclass(frozen=True)
class Training:
    """What came out of a training run.

    Attributes:
        losses: Loss of each optimizer step.
        seconds: Wall time, with all that the Trainer does around a step.
        tokens: Real tokens trained on.
    """

    losses: tuple[float, ...]
    seconds: float
    tokens: int

    @property
    def start(self) -> float:
        """Mean loss of the first twentieth of the steps."""
        return sum(self.losses[: self._share]) / self._share

    @property
    def end(self) -> float:
        """Mean loss of the last twentieth of the steps."""
        return sum(self.losses[-self._share :]) / self._share

    @property
    def _share(self) -> int:
        return max(1, len(self.losses) // 20)


def train(
    model: Any, packed: PackedDataset, *, steps: int, learning_rate: float, folder: Path, seed: int
) -> Training:
    """Train a model on packs, one pack a step.

    Args:
        model: The model, changed in place.
        packed: The packs.
        steps: Optimizer steps.
        learning_rate: The highest, after a warm-up over a tenth of the steps.
        folder: The Trainer's folder; nothing is written there.
        seed: Of the order of packs.

    Raises:
        MissingDependencyError: If accelerate is not installed.
    """
    from transformers import ProgressCallback, Trainer, TrainingArguments

    try:
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            # Pinned memory needs an accelerator, and warns without one.
            dataloader_pin_memory=False,
            # Rows carry no padding here, so all tokens are real ones.
            include_num_input_tokens_seen="all",
            disable_tqdm=False,
            seed=seed,
        )
    except ImportError as error:
        raise MissingDependencyError(
            "The Trainer needs accelerate. Write: pip install 'hf-neat-packing[trainer]'"
        ) from error
    collator = DataCollatorForNeatPacking(model)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=packed,
        data_collator=collator,
        callbacks=[PackingCallback()],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_loss_on_the_bar())
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Training(losses, seconds, int(trainer.state.num_input_tokens_seen))


def _loss_on_the_bar() -> Any:
    """Build the Trainer's progress bar, with the loss on it in place of a line a step."""
    from transformers import ProgressCallback

    class LossOnTheBar(ProgressCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if self.training_bar is not None and "loss" in logs:
                self.training_bar.set_postfix(loss=f"{float(logs['loss']):.2f}", refresh=False)

    return LossOnTheBar()
