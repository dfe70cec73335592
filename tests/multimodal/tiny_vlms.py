"""Tiny random models that read images, and documents with pixels and grids made by hand."""

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import hf_neat_packing  # noqa: F401  (registers the key)

VOCAB, IMAGE, VIDEO = 96, 90, 91
PATCH, CHANNELS, FRAMES = 2, 3, 2
PATCH_VALUES = CHANNELS * FRAMES * PATCH * PATCH

_SPECIAL = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_VISION = {
    "depth": 2, "num_heads": 2, "in_channels": CHANNELS, "patch_size": PATCH,
    "temporal_patch_size": FRAMES, "spatial_merge_size": 2,
}  # fmt: skip


def _qwen2_vl():
    text = {**_TEXT, "rope_parameters": _ROPE}
    vision = {**_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _qwen2_5_vl():
    text = {**_TEXT, "rope_parameters": _ROPE}
    vision = {
        **_VISION, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24,
        "window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _qwen3_vl():
    rope = {**_ROPE, "mrope_interleaved": True}
    text = {**_TEXT, "head_dim": 8, "rope_parameters": rope}
    vision = {
        **_VISION, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _glm4v():
    rope = {**_ROPE, "partial_rotary_factor": 1.0}
    text = {**_TEXT, "rope_parameters": rope}
    vision = {
        **_VISION, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24,
        "image_size": 16,
    }  # fmt: skip
    return Glm4vConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _gemma3():
    text = {
        **_TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE,
        boi_token_index=92, eoi_token_index=93,
    )  # fmt: skip


def _paligemma():
    text = {**_TEXT, "model_type": "gemma", "head_dim": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    return PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, projection_dim=32
    )


_MODELS = {
    "qwen2_vl": (_qwen2_vl, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (_qwen2_5_vl, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (_qwen3_vl, Qwen3VLForConditionalGeneration),
    "glm4v": (_glm4v, Glm4vForConditionalGeneration),
    "gemma3": (_gemma3, Gemma3ForConditionalGeneration),
    "paligemma": (_paligemma, PaliGemmaForConditionalGeneration),
}
GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


def tiny_vlm(name, key="neat_varlen"):
    """Build a tiny model in evaluation mode; the same name gives the same weights under every key."""
    config, cls = _MODELS[name][0](), _MODELS[name][1]
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=key, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def text(length, seed=0):
    """A document of random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 80, (length,), generator=generator).tolist()}


def pixels(patches, seed):
    """Random patches `[patches, values]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(patches, PATCH_VALUES, generator=generator)


def with_images(before, grids, after, seed=0):
    """A document: text, images with a token of text between them, text."""
    ids, types = text(before, seed)["input_ids"], [0] * before
    for index, (time, height, width) in enumerate(grids):
        if index:
            ids, types = [*ids, 5], [*types, 0]
        tokens = time * height * width // 4
        ids, types = [*ids, *[IMAGE] * tokens], [*types, *[1] * tokens]
    patches = sum(time * height * width for time, height, width in grids)
    return {
        "input_ids": ids + text(after, seed + 100)["input_ids"],
        "mm_token_type_ids": types + [0] * after,
        "pixel_values": pixels(patches, seed),
        "image_grid_thw": torch.tensor(grids),
    }


def with_video(name, before, grid, after, seed=0):
    """A document with one video; newer families put a token of text before every frame."""
    time, height, width = grid
    placeholder = IMAGE if name == "glm4v" else VIDEO
    frame = height * width // 4
    ids, types = text(before, seed)["input_ids"], [0] * before
    if name in ("qwen3_vl", "glm4v"):
        for index in range(time):
            ids, types = [*ids, 6 + index, *[placeholder] * frame], [*types, 0, *[2] * frame]
    else:
        ids, types = [*ids, *[placeholder] * (time * frame)], [*types, *[2] * (time * frame)]
    document = {
        "input_ids": ids + text(after, seed + 100)["input_ids"],
        "mm_token_type_ids": types + [0] * after,
        "pixel_values_videos": pixels(time * height * width, seed),
        "video_grid_thw": torch.tensor([grid]),
    }
    if name == "qwen2_5_vl":
        document["second_per_grid_ts"] = [1.5]
    return document


def gemma_image(before, images, after, seed=0):
    """A document for Gemma 3: text, images with text between them, text."""
    ids, types = text(before, seed)["input_ids"], [0] * before
    for index in range(images):
        if index:
            ids, types = [*ids, 5], [*types, 0]
        ids, types = [*ids, *[IMAGE] * 4], [*types, *[1] * 4]
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids + text(after, seed + 100)["input_ids"],
        "token_type_ids": types + [0] * after,
        "pixel_values": torch.randn(images, 3, 8, 8, generator=generator),
    }


def gemma_text(length, seed=0):
    """A document of text with its token types."""
    return {**text(length, seed), "token_type_ids": [0] * length}


def prefix_document(prefix, suffix, seed):
    """A document for PaliGemma: an image and a prefix that see both ways, and a causal suffix."""
    ids = text(prefix + suffix, seed)["input_ids"]
    return {
        "input_ids": [IMAGE] * 4 + ids,
        "token_type_ids": [0] * (4 + prefix) + [1] * suffix,
        "pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),
    }
