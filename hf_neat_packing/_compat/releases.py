"""Installed versions, and what depends on nothing else."""

import platform
from typing import Any

import torch
import transformers


def release(library: Any) -> tuple[int, ...]:
    """Read major and minor version of a library."""
    return tuple(int(part) for part in library.__version__.split(".")[:2])


def trainer_counts_shift_labels() -> bool:
    """Whether the Trainer counts the targets of an update in `shift_labels` (drop when transformers >= 5.12)."""
    return release(transformers) >= (5, 12)


def environment() -> dict[str, str]:
    """Name the versions and the hardware that a measured number belongs to."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name()
        if cuda
        else (platform.processor() or platform.machine()),
    }
