"""Looking through DDP, FSDP, PEFT and `torch.compile` to the model that was built."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .errors import UnsupportedModelError

_CHILDREN = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(model: Any) -> Any:
    """Return the model inside any number of wrappers.

    A wrapper is a module whose only child has one of the names that torch's wrappers use and whose
    forward hands everything on (`*args, **kwargs`). A model of one's own that has a child called
    `module` and a forward with inputs of its own is no wrapper.

    Args:
        model: a module, or any object for which `model.module` stands in.

    Raises:
        UnsupportedModelError: a PEFT method that puts virtual tokens into every row.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def entry_module(model: nn.Module) -> nn.Module:
    """Return the outermost module that is called by its own name: hooks there fire once per forward.

    Older PEFT releases run the model that they adapt by `.forward`, past its hooks, so a PEFT model is an entry.
    """
    while not _is_peft(model) and (inner := _inner(model)) is not None:
        model = inner
    return model


def forward_parameters(model: Any) -> dict[str, inspect.Parameter] | None:
    """List the parameters of a model's forward, or None where they cannot be read."""
    forward: Callable[..., Any] | None = getattr(model, "forward", None)
    if forward is None:
        return None
    try:
        return dict(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return None


def takes_any_keyword(parameters: dict[str, inspect.Parameter]) -> bool:
    """Whether a forward has `**kwargs`."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules whose parameters `fully_shard` or FSDP has split over processes."""
    # Where this module was never imported, nothing is sharded by it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        kind
        for name in ("FSDPModule", "FullyShardedDataParallel")
        if (kind := getattr(fsdp, name, None)) is not None
    )
    return [module for module in model.modules() if isinstance(module, kinds)]


def release_gathered_weights(model: nn.Module) -> None:
    """Let FSDP2 modules gather their weights anew at the next forward.

    The outermost `fully_shard` module keeps what it gathered until a backward, so after a forward without one, training
    would go on with the weights of that moment, whatever the optimizer writes.

    Args:
        model: the model after forwards without a backward; sharded or not, in any number of wrappers.
    """
    for module in sharded_modules(model):
        if hasattr(type(module), "reshard"):
            module.reshard()  # type: ignore[operator]


def _inner(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return None if hasattr(model, "forward") else getattr(model, "module", None)
    if _is_peft(model):
        return _peft_base(model)
    children = dict(model.named_children())
    name = next(iter(children), "")
    if len(children) == 1 and name in _CHILDREN and _hands_everything_on(model):
        return children[name]
    return None


def _hands_everything_on(model: nn.Module) -> bool:
    parameters = forward_parameters(model)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameters is not None and all(p.kind in variadic for p in parameters.values())


def _is_peft(model: nn.Module) -> bool:
    # Looked up on the class: PEFT and compile wrappers forward unknown attributes to the model inside.
    return hasattr(type(model), "get_base_model") and hasattr(type(model), "active_peft_config")


def _peft_base(model: Any) -> nn.Module:
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses {type(config).__name__}, which puts virtual tokens in front of every row. A "
            "packed row has several documents, and only the first would get them, with all boundaries "
            "shifted. Accepted: adapters that keep the tokens, such as LoRA. Train this method unpacked."
        )
    return model.get_base_model()  # type: ignore[no-any-return]
