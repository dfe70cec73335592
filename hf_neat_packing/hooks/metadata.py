"""What happens to packed boundaries once, when a model is entered.

A pipeline schedule splits a batch after the collator made it, on dimension 0 and without knowing what it splits.
So boundaries that must be flat are made here, from the forms that survive the split:

* native FlashAttention-4: the batch-major bundle is flattened;
* transformers' varlen kwargs (the flash keys, `neat_varlen`): rebuilt from the document map;
* everyone else: the bundle is taken away, so that a bare `cu_seqlens` selects no other code path; where the model
  reads 4-D masks, a 2-D mask with document numbers is refused, since it would be read as 0 and 1.

Hooks return new kwargs and never touch the caller's batch, so a second forward and recomputation see
what the first one saw. They fire when the model is called, not when `.forward` is called past it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..contract import DOCUMENT_MAP_KEY, METADATA_KEYS, VARLEN_KEYS, varlen_kwargs_from_document_map
from ..errors import ContractError
from ..metadata import flatten_packed_sequence_metadata
from ..offsets import check_cu_seqlens, without_padded_offsets
from ..wrappers import entry_module

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
EntryHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Arguments | None]

_INDICES, _CU_SEQLENS, _MAX_SEQLEN = METADATA_KEYS
_REGISTRY = "_neat_packing_entry_hook"


class EntryHookHandle:
    """A hook at the entry of a model; `remove()` it, or use the handle as a context manager.

    Attributes:
        module: the module that carries the hook.
        hook: the function that runs before its forward.
    """

    def __init__(self, module: nn.Module, hook: EntryHook, handle: RemovableHandle) -> None:
        self.module = module
        self.hook = hook
        self._handle = handle

    def remove(self) -> None:
        """Take the hook off; a second call does nothing."""
        self._handle.remove()
        if vars(self.module).get(_REGISTRY) is self:
            del self.module.__dict__[_REGISTRY]

    def __enter__(self) -> "EntryHookHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def install_native_fa4_metadata_hook(model: nn.Module) -> EntryHookHandle:
    """Flatten the unpadded bundle once per forward; see `flatten_packed_metadata_at_model_entry`."""
    return _install(model, flatten_packed_metadata_at_model_entry)


def install_strip_metadata_hook(model: nn.Module) -> EntryHookHandle:
    """Take the unpadded bundle away; see `strip_unused_packed_metadata_at_model_entry`."""
    return _install(model, strip_unused_packed_metadata_at_model_entry)


def install_dense_mask_hook(model: nn.Module) -> EntryHookHandle:
    """Strip the bundle and refuse indexed masks; see `guard_dense_mask_at_model_entry`."""
    return _install(model, guard_dense_mask_at_model_entry)


def install_varlen_rebuild_hook(model: nn.Module) -> EntryHookHandle:
    """Rebuild varlen kwargs from the document map; see `rebuild_varlen_kwargs_at_model_entry`."""
    return _install(model, rebuild_varlen_kwargs_at_model_entry)


def entry_hook(model: nn.Module) -> EntryHookHandle | None:
    """Return the hook that a model carries at its entry, or None."""
    return vars(entry_module(model)).get(_REGISTRY)


def remove_entry_hook(model: nn.Module) -> None:
    """Take off the hook that a model carries at its entry, if any."""
    if (installed := entry_hook(model)) is not None:
        installed.remove()


def _install(model: nn.Module, hook: EntryHook) -> EntryHookHandle:
    """Put a hook on the entry of a model: the one that is there, or in place of another of ours."""
    module = entry_module(model)
    installed = entry_hook(module)
    if installed is not None and installed.hook is hook:
        return installed
    if installed is not None:
        installed.remove()
    handle = EntryHookHandle(module, hook, module.register_forward_pre_hook(hook, with_kwargs=True))
    module.__dict__[_REGISTRY] = handle
    return handle


def flatten_packed_metadata_at_model_entry(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Flatten the unpadded bundle, after a pipeline split and before the layers.

    Args:
        module: the native FlashAttention-4 model.
        args: positional inputs, returned as they are.
        kwargs: inputs with `packed_token_indices` `[B, S]` and `cu_seqlens` `[B, columns]`, or flat ones.

    Returns:
        The inputs with a flat bundle, or None where there is no bundle.

    Raises:
        ContractError: pre-packed THD input, half a bundle, or one of another shape than the microbatch.
        BoundaryError: offsets and indices that contradict each other.
    """
    if kwargs.get("qkv_format") == "thd":
        raise ContractError(
            f"{type(module).__name__} runs native FlashAttention-4 and got `qkv_format='thd'`: pre-packed THD tokens "
            "carry padded offsets of their own, which are not the unpadded ones read here. "
            "Pass `[batch, sequence]` tokens with the bundle of `build_packed_sequence_metadata`."
        )
    indices, cu_seqlens = kwargs.get(_INDICES), kwargs.get(_CU_SEQLENS)
    if indices is None and cu_seqlens is None:
        return None
    if not (isinstance(indices, Tensor) and isinstance(cu_seqlens, Tensor)):
        raise ContractError(
            f"{type(module).__name__} got `{_INDICES}` as {type(indices).__name__} and `{_CU_SEQLENS}` as "
            f"{type(cu_seqlens).__name__}: both tensors are one bundle. Pass both, from "
            "`build_packed_sequence_metadata`, or neither."
        )
    rows, length = indices.shape if indices.ndim == 2 else (1, indices.numel())
    if indices.ndim == 2:
        _require_shape(_INDICES, indices, args, kwargs)
    flat, offsets = flatten_packed_sequence_metadata(indices, cu_seqlens, rows, length)
    return args, {**kwargs, _INDICES: flat, _CU_SEQLENS: offsets}


def strip_unused_packed_metadata_at_model_entry(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Take the unpadded bundle away from a model that does not want it.

    `packed_token_indices` marks the bundle; without it, `cu_seqlens` is somebody else's and stays.

    Args:
        module: the model.
        args: positional inputs, returned as they are.
        kwargs: inputs, perhaps with the bundle.

    Returns:
        The inputs without the bundle, or None where there is none. A tensor `max_seqlen` stays.
    """
    if kwargs.get(_INDICES) is None:
        return None
    dropped = {_INDICES, _CU_SEQLENS}
    if isinstance(kwargs.get(_MAX_SEQLEN), int):
        dropped.add(_MAX_SEQLEN)
    return args, {name: value for name, value in kwargs.items() if name not in dropped}


def guard_dense_mask_at_model_entry(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Strip the bundle, and refuse document numbers where a 4-D mask is read.

    Args:
        module: a model that reads 4-D masks.
        args: positional inputs, returned as they are.
        kwargs: inputs with a 4-D mask, a 0/1 padding mask or none.

    Returns:
        The inputs without the bundle, or None where there is none.

    Raises:
        ContractError: an `attention_mask` `[B, S]` with values above 1.
    """
    if is_indexed_packed_mask(kwargs.get("attention_mask")):
        raise ContractError(
            f"{type(module).__name__} got an `attention_mask` with document numbers. Its attention reads 4-D masks and "
            "casts a 2-D one to bool, so ids above 1 would mean no more than 'valid' and the documents "
            "of a row would see each other. Build batches with `DataCollatorForNeatPacking(model)`, or load the model "
            'with attn_implementation="neat_varlen", whose entry hook reads document numbers.'
        )
    return strip_unused_packed_metadata_at_model_entry(module, args, kwargs)


def rebuild_varlen_kwargs_at_model_entry(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Make varlen kwargs from the document map of this very microbatch.

    The map is `_packed_seq_ids`, or an `attention_mask` `[B, S]` with document numbers in it, which
    transformers would read as 0 and 1. The bundle of other consumers is taken away as well. Costs one device
    synchronisation per forward.

    Args:
        module: a model whose attention reads varlen kwargs.
        args: positional inputs, returned as they are.
        kwargs: inputs with a document map, with varlen kwargs of their own, or with neither.

    Returns:
        The inputs with the four kwargs and without a mask, or None where there are no boundaries.

    Raises:
        ContractError: a map of another shape than the microbatch, a mask that contradicts it, or some of the
            varlen kwargs without the others.
        BoundaryError: an invalid map, or offsets that do not cover the microbatch and no map to rebuild them.
    """
    stripped = strip_unused_packed_metadata_at_model_entry(module, args, kwargs)
    kwargs = kwargs if stripped is None else stripped[1]
    mask = kwargs.get("attention_mask")
    document_map = kwargs.get(DOCUMENT_MAP_KEY)
    if document_map is None and is_indexed_packed_mask(mask):
        document_map = mask
    if document_map is None:
        _check_own_offsets(module, args, kwargs)
        return stripped
    _require_shape("the document map", document_map, args, kwargs)
    _check_mask(module, mask, document_map)
    rebuilt = {**kwargs, **varlen_kwargs_from_document_map(document_map)}
    rebuilt.pop("attention_mask", None)
    if mask is document_map:
        rebuilt[DOCUMENT_MAP_KEY] = document_map
    return args, rebuilt


def is_indexed_packed_mask(attention_mask: Tensor | None) -> bool:
    """Whether a mask numbers documents: a non-bool `[B, S]` tensor with some value above 1.

    Rows of one document each are all 0 and 1 and look like a padding mask; only the contract tells
    them apart. Costs one device synchronisation.

    Args:
        attention_mask: any mask, or None.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype == torch.bool:
        return False
    if attention_mask.ndim != 2 or attention_mask.numel() == 0:
        return False
    return bool((attention_mask > 1).any())


def _token_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and tokens of the microbatch, where an input shows them."""
    named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]
    for value in [*named, *args[:1]]:
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[0], value.shape[1]
    return None


def _require_shape(name: str, value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    shape = _token_shape(args, kwargs)
    if shape is not None and tuple(value.shape) != shape:
        raise ContractError(
            f"{name} has shape {list(value.shape)}, inconsistent with the current microbatch of {shape[0]} rows of "
            f"{shape[1]} tokens: its boundaries belong to other tokens. Split, shift and shard it "
            "together with the tokens."
        )


def _check_own_offsets(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    present = [name for name in VARLEN_KEYS if kwargs.get(name) is not None]
    if not present:
        return
    if len(present) < len(VARLEN_KEYS):
        raise ContractError(
            f"{type(module).__name__} got {present} without the rest of {list(VARLEN_KEYS)}; transformers ignores "
            f"an incomplete set, and the documents would see each other. Pass all four, or `{DOCUMENT_MAP_KEY}`."
        )
    shape = _token_shape(args, kwargs)
    if shape is not None:
        for name in VARLEN_KEYS[:2]:
            offsets = without_padded_offsets(kwargs[name].detach().cpu())
            check_cu_seqlens(offsets, num_tokens=shape[0] * shape[1], name=name)


def _check_mask(module: nn.Module, mask: Any, document_map: Tensor) -> None:
    """Refuse a mask that says something else; transformers would follow it and drop the offsets."""
    if mask is None or mask is document_map:
        return
    accepted = f"Leave `attention_mask` out; `{DOCUMENT_MAP_KEY}` marks padding with 0."
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != document_map.shape:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ContractError(
            f"{type(module).__name__} reads varlen kwargs and got an `attention_mask` of shape {shape} beside a "
            f"document map of {list(document_map.shape)}: two sources of boundaries, and one is lost. {accepted}"
        )
    indexed = is_indexed_packed_mask(mask)
    if not torch.equal(
        mask.long() if indexed else mask != 0, document_map.long() if indexed else document_map != 0
    ):
        raise ContractError(
            f"`attention_mask` and `{DOCUMENT_MAP_KEY}` disagree about which tokens are real or whose they are; "
            f"transformers would follow the mask and drop the boundaries. {accepted}"
        )
