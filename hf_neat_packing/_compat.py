"""The only module that knows transformers or torch internals, or their versions.

Everything imported here is used under our own words elsewhere. `tests/test_compat.py` is the
contract test of each name; a release that moves one breaks that file and says which.
"""

import contextlib
import functools
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers  # where this fails, its own message says what is missing
from torch.utils._pytree import tree_map

from .errors import UnsupportedTransformersError

TESTED_TRANSFORMERS = ("5.6.0", "5.24.0")

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        DataCollatorWithFlattening,
        PreTrainedConfig,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        flash_attention_mask,
        flex_attention_mask,
        sdpa_mask,
    )
    from transformers.modeling_flash_attention_utils import (
        FLASH_ATTN_KERNEL_FALLBACK,
        FlashAttentionKwargs,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise UnsupportedTransformersError(
        f"hf_neat_packing stands on a name that the installed transformers lacks: {error}. It is tested with "
        f"transformers {TESTED_TRANSFORMERS[0]} to {TESTED_TRANSFORMERS[1]}. Install one of these: "
        f'pip install "transformers>={TESTED_TRANSFORMERS[0]}".'
    ) from error

__all__ = [
    "DataCollatorWithFlattening",
    "FlashAttentionKwargs",
    "MaskPattern",
    "PackHooks",
    "PreTrainedConfig",
    "assert_on_device",
    "attention_key",
    "autograd_inside_operator",
    "chunks_follow_positions",
    "current_backward",
    "eager_mask",
    "environment",
    "flash_attention_mask",
    "flex_attention_mask",
    "forward_hooks",
    "hub_kernel_mainline_name",
    "is_tracing",
    "known_attention_keys",
    "mask_kinds",
    "mask_pattern",
    "plain_torch_function",
    "register_attention",
    "registered_attention",
    "registered_mask",
    "saved_tensors_hooks_in_force",
    "sdpa_attention_forward",
    "sdpa_mask",
    "streams_tables",
    "tables_by_row",
    "torch_varlen_attention",
    "torch_varlen_groups_heads",
    "trainer_counts_shift_labels",
    "tree_map",
    "wrapper_tensor",
]

_MASKING_MODULE = causal_mask_function.__module__


def attention_key(config: Any) -> str | None:
    """Read the dispatch key of a config; transformers has no public getter (drop when it has)."""
    key = getattr(config, "_attn_implementation", None)
    return key if isinstance(key, str) else None


def register_attention(
    key: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> None:
    """Register an attention function and its mask function under one key."""
    AttentionInterface.register(key, attention)
    if mask is not None:
        AttentionMaskInterface.register(key, mask)


def registered_mask(key: str) -> Callable[..., Any] | None:
    """Return the mask function registered for a key, or None."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(key)  # type: ignore[no-any-return]


def registered_attention(key: str) -> Callable[..., Any] | None:
    """Return the attention function registered for a key, or None (`eager` has none)."""
    return ALL_ATTENTION_FUNCTIONS.get(key)  # type: ignore[no-any-return]


def known_attention_keys() -> list[str]:
    """List the keys that a config may hold, sorted."""
    return sorted({"eager", *ALL_ATTENTION_FUNCTIONS.keys()})


def hub_kernel_mainline_name(key: str) -> str | None:
    """Name the mainline key that a hub kernel id (`org/name[@revision][:function]`) stands in for."""
    repository = key.partition(":")[0].partition("@")[0]
    return next((n for n, r in FLASH_ATTN_KERNEL_FALLBACK.items() if r == repository), None)


def mask_kinds(layer_type: str) -> dict[str, str] | None:
    """Name the mask pattern behind each mask that a layer type takes; None where it has no entry."""
    kinds = {"causal": "full", "sliding": "sliding", "chunked": "chunked", "recurrent": "recurrent"}
    entry = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(layer_type)
    parts = entry if isinstance(entry, dict) else {layer_type: entry}
    names = {part: getattr(getattr(f, "func", f), "__name__", "") for part, f in parts.items()}
    return {p: kinds.get(n.split("_")[1], n) for p, n in names.items()} if entry else None


def trainer_counts_shift_labels() -> bool:
    """Whether the Trainer counts the targets of an update in `shift_labels` (drop when transformers >= 5.12)."""
    return _release(transformers) >= (5, 12)


def is_tracing() -> bool:
    """Whether torch records a graph, so that no value may be read and no object may be made."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Check a condition without reading it to the host; a false one aborts the device's work."""
    torch._assert_async(condition, message)


class MaskPattern(NamedTuple):
    """What a transformers mask function lets a query see, in steps from its own position.

    Attributes:
        left: keys before the query (None: all of them).
        right: keys after the query (None: all of them; 0: causal).
        chunk: tokens of an attention chunk counted from the document's start, or None.
        document_map: int `[B, S]` that transformers derived from restarting positions, or None.
    """

    left: int | None
    right: int | None
    chunk: int | None
    document_map: torch.Tensor | None


def mask_pattern(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """Read a mask function that transformers composed, or return None for anything else.

    Custom overlays (`or_masks`, block-wise image groups, a user's own function) are not read:
    whoever gets None must evaluate the function itself. Drop when mask functions describe themselves.
    """
    left = right = chunk = document_map = None
    for name, cells in _leaves(mask_function):
        if name == "causal":
            right = 0
        elif name == "sliding_window_overlay":
            left = _smaller(left, cells["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            left = _smaller(left, cells["sliding_window"])
            right = _smaller(right, cells["sliding_window"])
        elif name == "chunked_overlay":
            chunk = cells["chunk_size"]
        elif name == "packed_sequence_mask_function":
            document_map = cells["packed_sequence_mask"]
        elif name != "bidirectional":
            return None
    return MaskPattern(left, right, chunk, document_map)


def chunks_follow_positions() -> bool:
    """Whether a mask built for packed rows counts chunks from each document's start (drop with 5.6)."""
    return hasattr(sys.modules[_MASKING_MODULE], "remap_positions_for_packed_sequence")


def tables_by_row(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """Read tables of blocks at the row's own indices, as they are written.

    For packed rows transformers hands restarting positions to everything inside a mask function. Patterns want
    them; a table of image blocks that came as `or_mask_function` is then read at another document's places (drop
    when transformers remaps patterns only).
    """
    return _remapped(mask_function, None)


def _remapped(function: Callable[..., Any], positions: torch.Tensor | None) -> Callable[..., Any]:
    """Rebuild a composed function with the remapping pushed down to everything but tables."""
    name, cells = "", dict[str, Any]()
    if inspect.isfunction(function) and function.__module__ == _MASKING_MODULE:
        name = function.__qualname__.split(".")[0]
        cells = dict(inspect.getclosurevars(function).nonlocals)
    if name == "remap_positions_for_packed_sequence":
        return _remapped(cells["mask_function"], cells["position_ids"])
    if name in ("and_masks", "or_masks"):
        parts = [_remapped(part, positions) for part in cells["mask_functions"]]
        join = torch.logical_and if name == "and_masks" else torch.logical_or

        def joined(*index: Any) -> Any:
            return functools.reduce(join, [part(*index) for part in parts])

        return joined
    if positions is None or name == "blockwise_overlay":
        return function

    def remapped(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return function(batch, head, positions[batch, query], positions[batch, key])

    return remapped


def _smaller(old: int | None, new: int) -> int:
    return new if old is None else min(old, new)


def _leaves(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk the parts of an intersection of transformers' mask functions."""
    if function is causal_mask_function:
        yield "causal", {}
    elif function is bidirectional_mask_function:
        yield "bidirectional", {}
    elif inspect.isfunction(function) and function.__module__ == _MASKING_MODULE:
        name = function.__qualname__.split(".")[0]
        cells = dict(inspect.getclosurevars(function).nonlocals)
        if name == "and_masks":
            for part in cells["mask_functions"]:
                yield from _leaves(part)
        elif name == "remap_positions_for_packed_sequence":
            # Positions count from the document's start, which is how every pattern is meant here.
            yield from _leaves(cells["mask_function"])
        else:
            yield name, cells
    else:
        yield "unknown", {}


def wrapper_tensor(cls: type[torch.Tensor], shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Make a bool tensor that has a shape and no storage; every operation on it dispatches to its class."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)


# Operations on a wrapper tensor go to `__torch_dispatch__`, and results are not turned into the subclass.
plain_torch_function = torch._C._disabled_torch_function_impl


def _find_varlen() -> tuple[Callable[..., Any] | None, frozenset[str]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # drop at torch >= 2.10
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


# Found once, outside of any graph.
_VARLEN, _VARLEN_PARAMETERS = _find_varlen()


def torch_varlen_attention() -> Callable[..., Any] | None:
    """Return torch's own varlen attention, or None where this torch has none with a scale and a window.

    torch 2.10 had a causal flag instead (drop at torch >= 2.11).
    """
    return _VARLEN if {"scale", "window_size"} <= _VARLEN_PARAMETERS else None


def torch_varlen_groups_heads() -> bool:
    """Whether it takes fewer key heads than query heads (drop at torch >= 2.12)."""
    return "enable_gqa" in _VARLEN_PARAMETERS


def _release(library: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in library.__version__.split(".")[:2])


def streams_tables(source: Any) -> bool:
    """Whether a source is a `datasets.IterableDataset` that hands on Arrow tables as they are stored.

    Formatted, mapped and filtered ones make rows, and tables of those would be made of the rows. Their state between
    two tables is exact in the releases that are tested.

    Removal: a public way to ask (`IterableDataset` has neither `format` nor a reader of its tables).
    """
    library = sys.modules.get("datasets")
    if library is None or not isinstance(source, library.IterableDataset):
        return False
    if _release(library) < (5, 2) or source.features is None:
        return False
    examples = getattr(source, "_ex_iterable", None)
    unformatted = getattr(source, "_formatting", True) is None
    return unformatted and getattr(examples, "iter_arrow", None) is not None


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


@contextlib.contextmanager
def autograd_inside_operator() -> Iterator[None]:
    """Differentiate inside the kernel of a custom operator, where torch has switched autograd off.

    An operator is called below autograd; there is no public way back (drop when there is).
    """
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """List what runs before and after a module's forward, global hooks too; torch has no public getter."""
    shared = torch.nn.modules.module
    tables = (
        module._forward_pre_hooks,
        module._forward_hooks,
        shared._global_forward_pre_hooks,
        shared._global_forward_hooks,
    )
    return [hook for table in tables for hook in table.values()]


PackHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def current_backward() -> int:
    """Return a number for the backward pass that this thread is executing, -1 outside of one.

    torch has no public getter; `torch.utils.checkpoint` reads the same one (drop when there is).
    """
    return torch._C._current_graph_task_id()


def saved_tensors_hooks_in_force() -> PackHooks | None:
    """Return the innermost `saved_tensors_hooks` of this thread as `(pack, unpack)`, or None (as above)."""
    hooks: PackHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks
