"""The only package that knows transformers, torch or datasets internals, or their versions.

Everything imported here is used under our own words elsewhere. `tests/test_compat.py` is the
contract test of each name; a release that moves one breaks that file and says which.
"""

from .mask_functions import MaskPattern, chunks_follow_positions, mask_pattern, tables_by_row
from .releases import environment, trainer_counts_shift_labels
from .stored_data import data_fingerprint, row_indices, streams_tables
from .torch_internals import (
    PackHooks,
    assert_on_device,
    autograd_inside_operator,
    current_backward,
    forward_hooks,
    is_tracing,
    plain_torch_function,
    saved_tensors_hooks_in_force,
    torch_varlen_attention,
    torch_varlen_groups_heads,
    tree_map,
    wrapper_tensor,
)
from .transformers_names import (
    DataCollatorWithFlattening,
    FlashAttentionKwargs,
    PreTrainedConfig,
    attention_key,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    hub_kernel_mainline_name,
    known_attention_keys,
    mask_kinds,
    register_attention,
    registered_attention,
    registered_mask,
    sdpa_attention_forward,
    sdpa_mask,
)

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
    "data_fingerprint",
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
    "row_indices",
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
