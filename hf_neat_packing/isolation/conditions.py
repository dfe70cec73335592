"""What a probe needs of a model: ordinary token ids, its own eager attention, and nothing left behind."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import attention_key
from ..wrappers import release_gathered_weights


@contextmanager
def under_key(model: nn.Module, key: str, switch: bool = True) -> Iterator[bool]:
    """Run a model under another attention key for a while; yields whether it has configs that choose it."""
    if not switch:
        yield False
        return
    configs: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if (before := attention_key(config)) is not None:
            configs.setdefault(id(config), (config, before))
        for name in getattr(config, "sub_configs", {}):
            part = getattr(config, name, None)
            if (before := attention_key(part)) is not None:
                configs.setdefault(id(part), (part, before))
    try:
        for config, _ in configs.values():
            config.update({"_attn_implementation": key})
        yield bool(configs)
    finally:
        # A config sets the configs inside it too, so outer ones go first.
        for config, before in configs.values():
            config.update({"_attn_implementation": before})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; afterwards each module has the mode that it had, and FSDP2 no gathered weights."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        release_gathered_weights(model)
        for module, mode in modes:
            module.training = mode


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run forwards in eval mode and leave modes, buffers, gathered weights and random state as they were."""
    buffers = [
        (module, name, value, value.clone())
        for module in model.modules()
        for name, value in module.named_buffers(recurse=False)
    ]
    with torch.random.fork_rng(enabled=True):
        try:
            with evaluating(model):
                yield
        finally:
            with torch.no_grad():
                for module, name, value, copied in buffers:
                    value.copy_(copied)
                    setattr(module, name, value)


def plain_ids(model: Any) -> Tensor:
    """List token ids that no config of the model calls special, a few thousand at most."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    if table is None:
        table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    config = getattr(model, "config", None)
    size = getattr(table, "num_embeddings", None) or getattr(config, "vocab_size", None) or 128
    special = set(_special_ids(config))
    ids = [token for token in range(min(int(size), 4096)) if token not in special]
    return torch.tensor(ids[3:] if len(ids) > 16 else ids)


def _special_ids(config: Any) -> Iterator[int]:
    if config is None:
        return
    values: Iterable[tuple[str, Any]] = vars(config).items()
    for name, value in values:
        if name.endswith(("token_id", "token_index", "token_ids")):
            yield from [
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)
            ]
        elif hasattr(value, "to_dict"):
            yield from _special_ids(value)
