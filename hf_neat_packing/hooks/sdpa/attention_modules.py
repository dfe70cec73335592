"""Which modules of a model are its attention: by the usual names, by names or modules that are given."""

from collections.abc import Iterable, Iterator

from torch import nn

from ...errors import UnsupportedModelError
from ...wrappers import unwrap

USUAL_NAMES = ("self_attn", "self_attention", "attn", "attention")
"""Last parts of the names that attention modules have in most models."""

_WRAPPER_PARTS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


def find_attention_modules(
    model: nn.Module, modules: Iterable[str | nn.Module] | None = None
) -> dict[str, nn.Module]:
    """Find the attention modules of a model.

    Args:
        model: the model.
        modules: names (`"self_attn"`, `"layers.0.mixer"`: the end of a qualified name) or modules of the
            model. None: `USUAL_NAMES` and every `torch.nn.MultiheadAttention`.

    Returns:
        Qualified name -> module, inside of checkpoint and other wrappers, because a recompute calls only
        the inner one.

    Raises:
        UnsupportedModelError: something that was looked for is not there, or checkpoints its own forward.
    """
    found: dict[str, nn.Module] = {}
    if modules is None:
        found = dict(_usual(model))
        if not found:
            _raise_none(model, [*USUAL_NAMES, "torch.nn.MultiheadAttention"])
    for wanted in modules or ():
        matches = {
            name: module
            for name, module in _named(model)
            if (_ends_with(name, wanted) if isinstance(wanted, str) else module is unwrap(wanted))
        }
        if not matches:
            _raise_none(model, [wanted if isinstance(wanted, str) else type(wanted).__name__])
        found |= matches
    if not found:
        _raise_none(model, ["an empty list of modules"])
    for name, module in found.items():
        if hasattr(module, "gradient_checkpointing"):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) checkpoints its own forward, so a recompute would run past hooks on "
                "it and mix documents in the gradients. Give the attention module inside of it."
            )
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name every module as if there were no wrappers; a wrapper itself is left out."""
    for name, module in model.named_modules():
        if unwrap(module) is module:
            yield ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS), module


def _usual(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in _named(model):
        plain = type(module).__module__.startswith("torch.nn.")
        if isinstance(module, nn.MultiheadAttention) or (
            name.rpartition(".")[2] in USUAL_NAMES and not plain
        ):
            yield name, module


def _ends_with(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def _raise_none(model: nn.Module, looked_for: list[str]) -> None:
    kinds = sorted({n.rpartition(".")[2] for n, _ in _named(model)} - {""})
    names = [kind for kind in kinds if not kind.isdigit()]
    raise UnsupportedModelError(
        f"{type(model).__name__} has no module that matches {looked_for}; nothing would keep its documents apart. Its "
        f"modules are called {names[:40]}. Name those that call scaled_dot_product_attention: modules=[...]."
    )
