"""A digest of everything that decides what a dry run of a model measures.

Whatever is left out could turn a refusal into a pass, so what cannot be described has no digest at all.
"""

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from ._compat import (
    attention_key,
    environment,
    forward_hooks,
    registered_attention,
    registered_mask,
)
from .collator import DataCollatorForNeatPacking
from .isolation import isolation_of
from .wrappers import unwrap

# Packages that bring kernels, or change what models compute.
_PACKAGES: Final = (
    *("hf-neat-packing", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "causal-conv1d"),
    *("mamba-ssm", "flash-linear-attention", "peft", "accelerate", "liger-kernel", "unsloth"),
)
# Modules of transformers through which every attention goes; some tools replace their functions.
_SHARED: Final = (
    *("masking_utils", "modeling_flash_attention_utils", "modeling_rope_utils", "integrations"),
    *("cache_utils", "loss"),
)
_SIMPLE = (bool, int, float, str, type(None))
_CORNER = 8


def fingerprint(model: nn.Module, collator: Any) -> str | None:
    """Describe a model and the collator that writes its batches.

    Args:
        model: the model as it is trained, in its wrappers.
        collator: a `DataCollatorForNeatPacking`.

    Returns:
        Hexadecimal digits; None where something cannot be described.
    """
    try:
        parts = [
            _installation(),
            *_shared_code(),
            _collator(collator),
            *_modules(model),
            *_parameters(model),
            *_configs(model),
            _isolation(model),
        ]
    except Exception:
        # A guess at what cannot be read might meet another model's digest.
        return None
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


class _NotDescribableError(Exception):
    """Something that decides the outcome has no description."""


def _installation() -> str:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    switches = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
    return repr((environment(), versions, switches, _own_code()))


@functools.cache
def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _collator(collator: Any) -> str:
    media = collator.media
    own = media.positions is not None or media.own_masks is not None
    if own or type(collator) is not DataCollatorForNeatPacking:
        raise _NotDescribableError
    described = {
        name: value
        for name, value in vars(collator).items()
        # Rows of a dry run are as long as its documents.
        if name not in ("row_length", "pad_to_multiple_of")
    }
    for name, value in described.items():
        if isinstance(value, (set, frozenset)):
            described[name] = sorted(value)
        elif name not in ("capabilities", "media") and not _is_plain(value):
            raise _NotDescribableError
    return repr(sorted(described.items(), key=lambda item: item[0]))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_SIMPLE, tuple)) or (isinstance(value, (dict, list)) and not value)


def _modules(model: nn.Module) -> Iterator[str]:
    """Describe the classes, their code, and what was put over them on this model."""
    classes: dict[type, None] = {}
    for name, module in model.named_modules():
        kind = type(module)
        classes.setdefault(kind)
        simple = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _SIMPLE) and key != "training"
        }
        hooks = [_function(hook) for hook in forward_hooks(module)]
        own = vars(module).get("forward")
        replaced = "" if own is None else _function(own)
        yield repr(
            (name, kind.__module__, kind.__qualname__, sorted(simple.items()), hooks, replaced)
        )
    for kind in classes:
        yield repr((kind.__qualname__, _function(kind.forward), _source(kind)))


def _shared_code() -> Iterator[str]:
    """Describe what all models share, as it is now."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(tuple(f"transformers.{part}" for part in _SHARED)):
            yield name + repr(_functions(module))
    attention = torch.nn.functional.scaled_dot_product_attention
    yield _function(attention)


def _functions(module: Any) -> list[tuple[str, str]]:
    return [
        (name, _function(value))
        for name, value in sorted(vars(module).items())
        if isinstance(value, FunctionType)
    ]


def _source(kind: type) -> str:
    """Describe the module that a class was written in: its functions may have been replaced since."""
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    module = sys.modules[kind.__module__]
    path = inspect.getsourcefile(kind)
    if path is None:
        raise _NotDescribableError
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() + repr(_functions(module))


def _function(function: Callable[..., Any]) -> str:
    """Describe a function by where it is from and what it does."""
    if isinstance(function, MethodType):
        owner = type(function.__self__)
        return f"{owner.__module__}.{owner.__qualname__}:{_function(function.__func__)}"
    if isinstance(function, functools.partial):
        return f"partial({_function(function.func)}, {function.args!r}, {function.keywords!r})"
    if not isinstance(function, FunctionType):
        kind = type(function)
        return f"{kind.__module__}.{kind.__qualname__}"
    wrapped = getattr(function, "__wrapped__", None)
    inside = "" if wrapped is None else _function(wrapped)
    return f"{function.__module__}.{function.__qualname__}[{_code(function.__code__)}]{inside}"


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    text = repr((code.co_code, code.co_names, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    # The order of a set changes from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _parameters(model: nn.Module) -> Iterator[str]:
    """Describe shapes and dtypes, and which weights are zero: what is proven of those holds for no others."""
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        # A corner of each is looked at: to read all weights would take as long as the run.
        corners = [value.detach()[(slice(0, _CORNER),) * value.ndim] for _, value in named]
        zero = [not bool(corner.count_nonzero()) for corner in corners]
    for (name, value), is_zero in zip(named, zero, strict=True):
        yield repr((name, tuple(value.shape), str(value.dtype), value.device.type, is_zero))


def _configs(model: nn.Module) -> Iterator[str]:
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        values = config.to_dict()
        values.pop("_name_or_path", None)
        yield json.dumps(values, sort_keys=True, default=repr)
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        for key in map(attention_key, parts):
            attention, mask = registered_attention(key or ""), registered_mask(key or "")
            yield repr((key, attention and _function(attention), mask and _function(mask)))


def _isolation(model: nn.Module) -> str:
    report = isolation_of(model)
    if report is None:
        return ""
    return repr((report.applied, report.unpacked, report.capabilities, unwrap(model).__class__))
