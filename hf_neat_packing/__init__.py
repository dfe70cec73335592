"""Sequence packing for Hugging Face Transformers, exact for every document or an error.

Importing the package registers the attention key `neat_varlen` with transformers.
"""

from .attention import ATTENTION_KEY, register
from .audit import AuditReport, assert_isolated, audit_model
from .callback import PackingCallback
from .capabilities import (
    configure_packing,
    configure_packing_for_models,
    get_attn_implementation,
    get_model_attn_implementation,
    get_packing_capabilities,
    is_indexed_packed_mask,
    model_capabilities,
    validate_flash_packing_support,
)
from .collator import DataCollatorForNeatPacking
from .columns import ColumnRule
from .contract import (
    DEFAULT_PACKED_SEQUENCE_CONTRACT,
    AttentionBackendSelection,
    HFAttentionConsumer,
    LayerMask,
    NativeFA4Consumer,
    PackedMaskConsumer,
    PackedMaskType,
    PackedSequenceContract,
    PackingCapabilities,
    PackingMetadataConsumer,
    resolve_packing_contract,
)
from .dataset import nest_flat_packs, pack_dataset
from .dataset.packed_trainer import PackedTrainerMixin
from .dataset.samplers import RankBalancedPackSampler, TokenBudgetBatchSampler
from .dataset.streams import pack_stream
from .documents import get_seqlens_in_batch
from .hooks.expert_load import count_expert_load
from .hooks.sdpa import (
    attach_cp1_packed_varlen_hooks,
    configure_cp_varlen,
    cp1_packed_varlen_backend,
    detach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
    pack_sdpa_only_model,
)
from .isolation import IsolationReport, isolate
from .logps import preference_documents, token_logps, unpack_logps
from .loss_labels import labels_from_masks
from .losses import PackedEvaluation, per_document_loss, per_label_loss
from .metadata import (
    PackedSequenceMetadata,
    build_packed_sequence_metadata,
    flatten_packed_sequence_metadata,
)
from .mixins import DocumentIdsMixin, HFDispatchMixin, NativeFA4Mixin, RecurrentPackingMixin
from .offsets import get_unpad_data
from .padding import (
    PaddingFree,
    pack_padded,
    pack_sequence_classifier,
    padding_free,
    unpack_to_padded,
)
from .planning import PackingPlan, PackingReport, plan_packing
from .subdocuments import (
    TrainingBatch,
    adapt_model_inputs,
    enable_xdoc_attention,
    require_supported_packing_contract,
)

__all__ = [
    "ATTENTION_KEY",
    "DEFAULT_PACKED_SEQUENCE_CONTRACT",
    "AttentionBackendSelection",
    "AuditReport",
    "ColumnRule",
    "DataCollatorForNeatPacking",
    "DocumentIdsMixin",
    "HFAttentionConsumer",
    "HFDispatchMixin",
    "IsolationReport",
    "LayerMask",
    "NativeFA4Consumer",
    "NativeFA4Mixin",
    "PackedEvaluation",
    "PackedMaskConsumer",
    "PackedMaskType",
    "PackedSequenceContract",
    "PackedSequenceMetadata",
    "PackedTrainerMixin",
    "PackingCallback",
    "PackingCapabilities",
    "PackingMetadataConsumer",
    "PackingPlan",
    "PackingReport",
    "PaddingFree",
    "RankBalancedPackSampler",
    "RecurrentPackingMixin",
    "TokenBudgetBatchSampler",
    "TrainingBatch",
    "adapt_model_inputs",
    "assert_isolated",
    "attach_cp1_packed_varlen_hooks",
    "audit_model",
    "build_packed_sequence_metadata",
    "configure_cp_varlen",
    "configure_packing",
    "configure_packing_for_models",
    "count_expert_load",
    "cp1_packed_varlen_backend",
    "detach_cp1_packed_varlen_hooks",
    "disable_cp1_packed_varlen",
    "enable_cp1_packed_varlen",
    "enable_xdoc_attention",
    "flatten_packed_sequence_metadata",
    "get_attn_implementation",
    "get_model_attn_implementation",
    "get_packing_capabilities",
    "get_seqlens_in_batch",
    "get_unpad_data",
    "is_indexed_packed_mask",
    "isolate",
    "labels_from_masks",
    "model_capabilities",
    "nest_flat_packs",
    "pack_dataset",
    "pack_padded",
    "pack_sdpa_only_model",
    "pack_sequence_classifier",
    "pack_stream",
    "padding_free",
    "per_document_loss",
    "per_label_loss",
    "plan_packing",
    "preference_documents",
    "register",
    "require_supported_packing_contract",
    "resolve_packing_contract",
    "token_logps",
    "unpack_logps",
    "unpack_to_padded",
    "validate_flash_packing_support",
]

register()
