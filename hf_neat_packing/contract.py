"""What a model declares about packing, and the contract that a collator follows.

Two sides meet here without importing each other. A model says what it needs with class attributes
(inherit one of `mixins`, or write the attribute); a collator reads a contract, any object with the two
attributes of `PackedSequenceContract`. `PackingCapabilities` is the contract that comes from a
built model; it pickles without the model, so it travels to loader workers.

The varlen kwargs are written here and nowhere else; their names are those that attention reads.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from .attention.boundaries import DOCUMENT_MAP_KWARG, VARLEN_KWARGS
from .errors import ContractError
from .offsets import full_stream_cu_seqlens

PackedMaskType = Literal["block_causal", "document_ids", "flash_varlen"]
"""What the batch says about boundaries: a 4-D mask, the document map, or varlen offsets."""

MaskLayout = Literal["varlen", "bool_4d", "additive_4d", "block_mask", "document_ids"]
"""The form of it that the model's attention function reads."""

MaskDelivery = Literal["single", "dict", "windowed"]
"""How a model takes 4-D masks: one for all layers, one per layer type, or one with its window in it."""

DOCUMENT_MAP_KEY: Final = DOCUMENT_MAP_KWARG
"""Batch key of the document map `[B, S]`."""

VARLEN_KEYS: Final = VARLEN_KWARGS
"""Batch keys of the full-stream offsets: the names of transformers' `FlashAttentionKwargs`."""

METADATA_KEYS: Final = ("packed_token_indices", "cu_seqlens", "max_seqlen")
"""Batch keys of the unpadded bundle: the fields of `PackedSequenceMetadata`."""

METADATA_FLAGS: Final = ("requires_packed_sequence_metadata", "return_packed_sequence_metadata")
"""The flag that asks for the bundle; the second spelling is the newer one, and both are read."""

_LAYOUTS: Final[dict[PackedMaskType, tuple[MaskLayout, ...]]] = {
    "block_causal": ("bool_4d", "additive_4d", "block_mask"),
    "document_ids": ("document_ids",),
    "flash_varlen": ("varlen",),
}

# Names of the deprecated keyword, which knows no model; a built model is looked up by `capabilities`.
_LEGACY_LAYOUTS: Final[dict[str, MaskLayout]] = {
    "flash_attention_2": "varlen",
    "flash_attention_3": "varlen",
    "flash_attention_4": "varlen",
    "neat_varlen": "varlen",
    "eager": "additive_4d",
    "flex_attention": "block_mask",
}


class PackedSequenceContract(Protocol):
    """What a collator needs to know: any object with these two attributes is a contract.

    Attributes:
        packed_mask_type: what the batch says about boundaries.
        requires_packed_sequence_metadata: whether the unpadded bundle is added to the batch.
    """

    @property
    def packed_mask_type(self) -> PackedMaskType: ...  # noqa: D102

    @property
    def requires_packed_sequence_metadata(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class _DefaultPackedSequenceContract:
    packed_mask_type: PackedMaskType = "block_causal"
    requires_packed_sequence_metadata: bool = False


DEFAULT_PACKED_SEQUENCE_CONTRACT: Final[PackedSequenceContract] = _DefaultPackedSequenceContract()
"""The contract of a caller that knows nothing about the model: one boolean block-causal mask."""


@runtime_checkable
class AttentionBackendSelection(Protocol):
    """A typed choice of attention, carried by a custom model as `model.backend`."""

    attn: str


@runtime_checkable
class NativeFA4Consumer(Protocol):
    """A model whose attention layers call FlashAttention-4 themselves, with unpadded offsets."""

    _uses_native_fa4: bool


@runtime_checkable
class PackedMaskConsumer(Protocol):
    """A model that makes its own masks and says from what."""

    packed_mask_type: PackedMaskType


@runtime_checkable
class PackingMetadataConsumer(Protocol):
    """A model that needs the unpadded bundle to restart recurrent state at each document."""

    requires_packed_sequence_metadata: bool


@runtime_checkable
class HFAttentionConsumer(Protocol):
    """A model whose attention is dispatched by the key of its config, whatever `backend.attn` says."""

    _uses_hf_attention: bool


@dataclass(frozen=True)
class LayerMask:
    """The pattern that the layers of one type put over their documents.

    Attributes:
        layer_type: name in `config.layer_types`, the key of a dict of masks.
        kind: everything, a sliding window, chunks counted from the document's start, or no mask at all
            (`recurrent`, None in a dict of masks).
        size: what the config says for windows and chunks, None for the others. A causal window of `size` holds
            the query and `size - 1` tokens before it; a bidirectional one `size` tokens on each side.
    """

    layer_type: str = "full_attention"
    kind: Literal["full", "sliding", "chunked", "recurrent"] = "full"
    size: int | None = None

    def __post_init__(self) -> None:
        if (self.kind in ("sliding", "chunked")) != (self.size is not None and self.size > 0):
            raise ContractError(
                f"The {self.kind!r} mask of {self.layer_type!r} has size {self.size!r}; `sliding` and "
                "`chunked` take 1 token or more, `full` and `recurrent` none."
            )


@dataclass(frozen=True)
class PackingCapabilities:
    """What a built model needs from a packed batch.

    Attributes:
        packed_mask_type: what the batch says about boundaries.
        requires_packed_sequence_metadata: whether the unpadded bundle is added.
        uses_native_fa4: whether the model calls FlashAttention-4 itself.
        attention_key: the resolved key that decided, None where there was no model.
        layout: the form that the attention function reads; default: the plain one of the mask type.
        requires_seq_idx: whether `seq_idx` `[B, S]` is added for convolutions of recurrent layers.
        layer_masks: the patterns of the layers, one per layer type, for 4-D layouts.
        mask_delivery: how the model takes 4-D masks.
        is_causal: whether tokens see only earlier ones; False for encoders.
        mask_dtype: dtype of additive masks; default float32.
        position_ids_start: position of a document's first token.
        trace: why, in the order of the decisions.
    """

    packed_mask_type: PackedMaskType
    requires_packed_sequence_metadata: bool = False
    uses_native_fa4: bool = False
    attention_key: str | None = None
    layout: MaskLayout | None = None
    requires_seq_idx: bool = False
    layer_masks: tuple[LayerMask, ...] = (LayerMask(),)
    mask_delivery: MaskDelivery = "single"
    is_causal: bool = True
    mask_dtype: torch.dtype = torch.float32
    position_ids_start: int = 0
    trace: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_mask_type(self.packed_mask_type)
        accepted = _LAYOUTS[self.packed_mask_type]
        if self.layout is None:
            object.__setattr__(self, "layout", accepted[0])
        elif self.layout not in accepted:
            raise ContractError(
                f"The layout {self.layout!r} does not say {self.packed_mask_type!r}; accepted: {list(accepted)}."
            )

    def __str__(self) -> str:
        lines = [f"PackingCapabilities: {self.packed_mask_type}, written as {self.layout}"]
        lines.append(f"  attention key: {self.attention_key or 'none (no model given)'}")
        if self.packed_mask_type == "block_causal":
            patterns = [
                f"{mask.layer_type}={mask.kind}{f' {mask.size}' if mask.size else ''}"
                for mask in self.layer_masks
            ]
            direction = "causal" if self.is_causal else "bidirectional"
            lines.append(
                f"  masks: {', '.join(patterns)}; {direction}, taken as {self.mask_delivery}"
            )
        wants = [
            ("unpadded bundle", self.requires_packed_sequence_metadata),
            ("seq_idx", self.requires_seq_idx),
            ("flattening at model entry (native FA4)", self.uses_native_fa4),
        ]
        lines.append(f"  also wants: {', '.join(n for n, wanted in wants if wanted) or 'nothing'}")
        lines += [f"  because {reason}" for reason in self.trace]
        return "\n".join(lines)


def check_mask_type(mask_type: Any) -> None:
    """Raise unless a value is a `PackedMaskType`.

    Raises:
        ContractError: naming the value and the accepted ones.
    """
    if mask_type not in get_args(PackedMaskType):
        raise ContractError(
            f"packed_mask_type is {mask_type!r}, and a batch written for it would hold boundaries that no model "
            f"reads; accepted: {list(get_args(PackedMaskType))}."
        )


def requires_metadata(declaring: Any) -> bool:
    """Read whether a model or contract asks for the unpadded bundle, in either spelling.

    Args:
        declaring: any object; one that declares nothing asks for nothing.

    Raises:
        ContractError: a declaration that is no bool, or two spellings that disagree.
    """
    found = {
        name: value
        for name in METADATA_FLAGS
        if (value := getattr(declaring, name, None)) is not None
    }
    if any(not isinstance(value, bool) for value in found.values()) or len(set(found.values())) > 1:
        raise ContractError(
            f"{type(declaring).__name__} declares {found}: the two names are one flag, so give one of them "
            "(or both alike), True or False."
        )
    return any(found.values())


def as_packing_capabilities(contract: Any) -> PackingCapabilities:
    """Read any object with the two attributes of a contract.

    Args:
        contract: `PackingCapabilities` (returned as it is) or a structural contract.

    Raises:
        ContractError: an unknown mask type, a missing attribute or a flag that is no bool.
    """
    if isinstance(contract, PackingCapabilities):
        return contract
    mask_type = getattr(contract, "packed_mask_type", None)
    check_mask_type(mask_type)
    return PackingCapabilities(
        packed_mask_type=mask_type,  # type: ignore[arg-type]
        requires_packed_sequence_metadata=requires_metadata(contract),
        trace=(f"{type(contract).__name__} was given; no model was looked at",),
    )


def resolve_packing_contract(
    packing: PackedSequenceContract, attn_implementation: str | None
) -> PackedSequenceContract:
    """Translate the deprecated `attn_implementation` keyword into a contract.

    Args:
        packing: the contract; wins over the keyword unless it is `DEFAULT_PACKED_SEQUENCE_CONTRACT`.
        attn_implementation: deprecated backend name, or None.

    Returns:
        `packing` itself, or the contract of the name: varlen for the flash keys, else block-causal.
    """
    if attn_implementation is None:
        return packing
    warnings.warn(
        "`attn_implementation=` is deprecated: a name cannot say what the built model runs. "
        "Pass `model=model`, or `packing=configure_packing_for_models([model])`.",
        DeprecationWarning,
        stacklevel=2,
    )
    if packing is not DEFAULT_PACKED_SEQUENCE_CONTRACT:
        return packing
    layout = _LEGACY_LAYOUTS.get(attn_implementation, "bool_4d")
    return PackingCapabilities(
        packed_mask_type="flash_varlen" if layout == "varlen" else "block_causal",
        attention_key=attn_implementation,
        layout=layout,
        trace=(f"the deprecated keyword named {attn_implementation!r}; no model was looked at",),
    )


def varlen_kwargs_from_document_map(document_map: Tensor) -> dict[str, Any]:
    """Write the boundaries of a batch as the four varlen kwargs of transformers.

    Costs one device synchronisation.

    Args:
        document_map: `[B, S]`.

    Returns:
        int32 offsets `[segments+1]` of the full stream, and the longest segment as a Python int.
    """
    return varlen_kwargs(*full_stream_cu_seqlens(document_map))


def varlen_kwargs(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Write full-stream offsets as the four varlen kwargs: the one place where they get those names."""
    return dict(zip(VARLEN_KEYS, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), strict=True))
