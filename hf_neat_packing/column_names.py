"""Column names that mean the same thing across Transformers and TRL."""

TOKEN_COLUMNS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "position_ids",
    "loss_mask",
    "completion_mask",
    "assistant_masks",
    "special_tokens_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
)
"""One value per token."""

LABEL_COLUMNS = ("labels", "shift_labels")
"""One target per token."""

DOCUMENT_COLUMNS = ("label", "document_weight")
"""One value per document."""

MEDIA_COLUMNS = (
    "images",
    "videos",
    "audios",
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_sizes",
    "image_position_ids",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "spatial_shapes",
    "input_features",
    "input_features_mask",
    "feature_attention_mask",
)
"""Pixels, frames, grids and sounds that belong to placeholders of a document."""

BOUNDARY_COLUMNS = frozenset(
    {
        "seq_lengths",
        "seq_idx",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "cu_seqlens",
        "max_length_q",
        "max_length_k",
        "_packed_seq_ids",
    }
)
"""They say that rows are packs already; packing them again would lose their boundaries."""
