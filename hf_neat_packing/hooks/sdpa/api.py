"""Packed rows for models whose attention reaches only `scaled_dot_product_attention`.

Such a model takes no boundaries: remote code, architectures that do not look at the attention registry, encoders
of `torch.nn.MultiheadAttention`. One line packs it:

    with pack_sdpa_only_model(model):
        trainer.train()

The hook at the entry of the model reads the boundaries of the batch and takes away the keys that the forward
does not know; hooks on its attention modules confine their calls to the documents, at the cost of the sum of
squared document lengths. Forwards without boundaries run as they are. Attention that cannot be confined raises.
How boundaries stay with their forward through activation recompute is in `packed_forward`.

`attach_cp1_packed_varlen_hooks`, `enable_cp1_packed_varlen`, `disable_cp1_packed_varlen`,
`cp1_packed_varlen_backend` and `configure_cp_varlen` are the names that NeMo AutoModel documents, for models that
say their boundaries themselves.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...contract import DOCUMENT_MAP_KEY, METADATA_KEYS, VARLEN_KEYS
from ...errors import ContractError, UnsupportedModelError
from ...wrappers import entry_module, forward_parameters, takes_any_keyword, unwrap
from ..metadata import (
    Arguments,
    is_indexed_packed_mask,
    strip_unused_packed_metadata_at_model_entry,
)
from .attachment import SdpaHooksHandle, Settings, attach, attachment
from .attention_modules import find_attention_modules
from .packed_attention import Armed, resolve_backend
from .packed_calls import PackedAttentionMode
from .packed_forward import (
    arm_forward,
    close_forward,
    current_forward,
    inherit_forward,
    mark_output,
    open_forward,
    wait_with,
    waiting,
)
from .packed_rows import PackedRows, document_map_of_inputs, packed_rows

__all__ = [
    "SdpaHooksHandle",
    "attach_cp1_packed_varlen_hooks",
    "configure_cp_varlen",
    "cp1_packed_varlen_backend",
    "detach_cp1_packed_varlen_hooks",
    "disable_cp1_packed_varlen",
    "enable_cp1_packed_varlen",
    "pack_sdpa_only_model",
]

# What only a model that knows packing takes.
_BOUNDARY_KEYS = (DOCUMENT_MAP_KEY, *VARLEN_KEYS, "seq_idx")

# The choice for forwards that name no backend. It is read when a forward begins and rides with it.
_configured = {"backend": "auto"}


def pack_sdpa_only_model(
    model: nn.Module,
    *,
    modules: Iterable[str | nn.Module] | None = None,
    backend: str | None = None,
    bidirectional: bool = False,
) -> SdpaHooksHandle:
    """Let a model that reaches only SDPA run packed batches, each document as if it were alone.

    Boundaries are read from the batch: `_packed_seq_ids` `[B, S]`, the four varlen kwargs, or an
    `attention_mask` `[B, S]` that numbers documents.

    Args:
        model: the model, under any wrappers. Its forward must be called as `model(...)`.
        modules: names or modules of the attention; default: the usual names and `nn.MultiheadAttention`.
        backend: `auto`, `flash`, `te`, `torch_varlen` or `sdpa`; default: what `configure_cp_varlen` chose.
        bidirectional: True for encoders, whose attention has neither a mask nor `is_causal`.

    Returns:
        A handle: a context manager, or call `remove()`.

    Raises:
        UnsupportedModelError: no such attention modules.
        ContractError: an unknown backend, or other hooks on the model.
        MissingDependencyError: a backend that is not installed.

    Example:
        >>> handle = pack_sdpa_only_model(model)  # doctest: +SKIP
    """
    return _attach(model, modules, backend, bidirectional=bidirectional, reads_batch=True)


def attach_cp1_packed_varlen_hooks(
    model: nn.Module,
    *,
    modules: Iterable[str | nn.Module] | None = None,
    bidirectional: bool = False,
) -> SdpaHooksHandle:
    """Confine the attention of a model to the documents given to `enable_cp1_packed_varlen`.

    A second call on the same model adds a handle and no hooks.

    Args:
        model: the model whose forward, or whose caller, enables and disables.
        modules: names or modules of the attention; default: the usual names and `nn.MultiheadAttention`.
        bidirectional: True for encoders.

    Returns:
        A handle: a context manager, or call `remove()`.

    Raises:
        UnsupportedModelError: no such attention modules.
        ContractError: other hooks on the model.
    """
    return _attach(model, modules, None, bidirectional=bidirectional, reads_batch=False)


def detach_cp1_packed_varlen_hooks(model: nn.Module) -> None:
    """Take all packed SDPA hooks off a model; without any, nothing happens."""
    present = attachment(entry_module(model))
    for handle in list(present.handles) if present is not None else []:
        handle.remove()


def enable_cp1_packed_varlen(doc_ids: Tensor, backend: str | None = None) -> None:
    """Give the forward that runs on this thread its documents, or the ones that follow if none runs.

    A forward keeps what it was given for its recompute, whatever is enabled or disabled later.

    Args:
        doc_ids: integer `[S]` or `[B, S]`, 1-based document numbers, 0 = padding.
        backend: a name of the backends or a synonym; default: what `configure_cp_varlen` chose.

    Raises:
        BoundaryError: an invalid map.
        ContractError: an unknown backend.
        MissingDependencyError: a backend that is not installed.
    """
    armed = Armed(packed_rows(doc_ids), resolve_backend(backend or _configured["backend"]))
    forward = current_forward()
    if forward is None:
        wait_with(armed)
    else:
        forward.give(replace(forward.armed, rows=armed.rows, backend=armed.backend))


def disable_cp1_packed_varlen() -> None:
    """Run what follows on this thread without documents: the rest of a running forward, and later ones."""
    wait_with(None)
    forward = current_forward()
    if forward is not None:
        forward.give(replace(forward.armed, rows=None))


def configure_cp_varlen(*, attn_backend: str | None = None) -> None:
    """Choose the backend of packed forwards that name none, for the whole process.

    Args:
        attn_backend: `auto`, `flash`, `te`, `torch_varlen`, `sdpa` or a synonym; None is `auto`.

    Raises:
        ContractError: an unknown name.
        MissingDependencyError: a backend that is not installed.
    """
    _configured["backend"] = resolve_backend(attn_backend)


def cp1_packed_varlen_backend() -> str | None:
    """Return the backend that was configured, or None where each call takes the best one (`auto`)."""
    return None if _configured["backend"] == "auto" else _configured["backend"]


def _attach(
    model: nn.Module,
    modules: Iterable[str | nn.Module] | None,
    backend: str | None,
    *,
    bidirectional: bool,
    reads_batch: bool,
) -> SdpaHooksHandle:
    root = entry_module(model)
    found = find_attention_modules(root, modules)
    settings = Settings(
        backend=None if backend is None else resolve_backend(backend),
        bidirectional=bidirectional,
        reads_batch=reads_batch,
        names=tuple(found),
    )
    return attach(root, found, settings, enter=_enter_model, leave=_leave_model)


def _enter_model(
    owner: int, settings: Settings, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Open a forward, find its boundaries, and hand on what the model takes."""
    forward = open_forward(module)
    rows, given = None, waiting()
    if settings.reads_batch:
        rows, kwargs = _read_batch(module, args, kwargs)
    if rows is None and given is None and inherit_forward(forward):
        return args, kwargs
    backend = settings.backend or _configured["backend"]
    if rows is None and given is not None:
        rows, backend = given.rows, given.backend
    arm_forward(forward, Armed(rows, backend, settings.bidirectional, owner), PackedAttentionMode())
    return args, kwargs


def _leave_model(module: nn.Module, args: Any, output: Any) -> None:
    forward = close_forward(module)
    if forward is None or output is None:
        return
    if torch.is_grad_enabled():
        mark_output(forward, output)
    if forward.armed.rows is None or forward.hits:
        return
    raise UnsupportedModelError(
        f"{type(module).__name__} ran a packed forward of {list(forward.armed.rows.shape)} in which none of its hooked "
        "attention modules reached scaled_dot_product_attention, so nothing kept its documents apart. Name "
        "the modules that call it: modules=[...]."
    )


def _read_batch(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PackedRows | None, dict[str, Any]]:
    """Find the documents of a batch and drop the keys that the forward does not name."""
    parameters = forward_parameters(unwrap(module)) or {}
    inputs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    document_map = document_map_of_inputs(inputs)
    if document_map is None:
        return None, kwargs
    rows = packed_rows(document_map)
    _check_positions(module, parameters, inputs, rows)
    unknown = {name for name in _BOUNDARY_KEYS if name not in parameters}
    if METADATA_KEYS[0] not in parameters:
        stripped = strip_unused_packed_metadata_at_model_entry(module, args, kwargs)
        kwargs = kwargs if stripped is None else stripped[1]
    kwargs = {name: value for name, value in kwargs.items() if name not in unknown}
    if is_indexed_packed_mask(inputs.get("attention_mask")):
        # As a 0/1 mask it says what is padding, which is all that such a model reads from it.
        kwargs["attention_mask"] = (document_map != 0).to(document_map.dtype)
    return rows, kwargs


def _check_positions(
    module: nn.Module, parameters: dict[str, Any], inputs: dict[str, Any], rows: PackedRows
) -> None:
    """Positions must restart with each document wherever the model has absolute ones."""
    if len(rows.lengths) <= rows.shape[0]:
        return
    given = inputs.get("position_ids") is not None
    if "position_ids" in parameters and not given:
        raise ContractError(
            f"{type(module).__name__} takes `position_ids` and the packed batch has none, so positions would run on "
            "from one document into the next. Pass `position_ids_from_document_map(document_map)`, as "
            "DataCollatorForNeatPacking does."
        )
    if given and "position_ids" not in parameters and not takes_any_keyword(parameters):
        raise ContractError(
            f"The forward of {type(module).__name__} takes no `position_ids`, so it counts positions from the start of "
            "the row. If they are relative (rotary, ALiBi), documents are exact without them: remove the key from the "
            "batch. If they are absolute (learned), this model cannot be packed."
        )
