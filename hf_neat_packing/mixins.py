"""Mixins with which a custom model says what it needs from a packed batch.

Each adds class attributes that `capabilities` reads on the built model (through DDP, FSDP, PEFT and
`torch.compile` wrappers) and one method that answers "what are my boundaries in this batch?". None has an
`__init__` or a forward, so they go anywhere into the bases of a class:

    class MyModel(RecurrentPackingMixin, DocumentIdsMixin, nn.Module): ...

Legend: `B` rows, `S` tokens in a row, `N` documents, `T` real tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .contract import (
    DOCUMENT_MAP_KEY,
    METADATA_KEYS,
    VARLEN_KEYS,
    PackedMaskType,
    varlen_kwargs_from_document_map,
)
from .errors import ContractError
from .metadata import flatten_packed_sequence_metadata
from .offsets import get_unpad_data


class PackedDocuments(NamedTuple):
    """The real tokens of a batch as one flat stream of documents.

    Attributes:
        indices: int64 `[T]` into the flattened `[B*S]`; `hidden.reshape(B * S, -1)[indices]` gathers them.
        cu_seqlens: int32 `[N+1]` offsets of the documents in the gathered stream.
        max_seqlen: tokens of the longest document, or an upper bound of it.
    """

    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def packed_documents(
    batch: Mapping[str, Any], *, batch_size: int, sequence_length: int
) -> PackedDocuments | None:
    """Read the flat stream of documents out of what a forward was called with.

    The unpadded bundle wins, then the document map, then an integer 2-D `attention_mask`.

    Args:
        batch: keyword arguments of the forward.
        batch_size: rows `B` of the microbatch.
        sequence_length: tokens `S` of a row.

    Returns:
        The documents, or None where the batch holds no boundaries at all.

    Raises:
        ContractError: half a bundle, or a map of another shape.
        BoundaryError: boundaries that contradict each other.
    """
    indices, cu_seqlens = batch.get(METADATA_KEYS[0]), batch.get(METADATA_KEYS[1])
    if indices is not None:
        if cu_seqlens is None:
            raise ContractError(
                f"`{METADATA_KEYS[0]}` came without `{METADATA_KEYS[1]}`; the two are one bundle, made by "
                "`build_packed_sequence_metadata`. Pass both."
            )
        flat, offsets = flatten_packed_sequence_metadata(
            indices, cu_seqlens, batch_size, sequence_length
        )
        longest = batch.get(METADATA_KEYS[2])
        return PackedDocuments(
            flat, offsets, int(torch.diff(offsets).max()) if longest is None else int(longest)
        )
    document_map = batch.get(DOCUMENT_MAP_KEY)
    if document_map is None:
        document_map = batch.get("attention_mask")
    if not isinstance(document_map, Tensor) or document_map.ndim != 2:
        return None
    if tuple(document_map.shape) != (batch_size, sequence_length):
        raise ContractError(
            f"The document map has shape {list(document_map.shape)}, but the microbatch has {batch_size} rows of "
            f"{sequence_length} tokens. Split or shift the map together with the tokens."
        )
    return PackedDocuments(*get_unpad_data(document_map))


class NativeFA4Mixin:
    """Declares that the attention layers call FlashAttention-4 themselves on unpadded tokens.

    The batch then holds the document map as `attention_mask` and the unpadded bundle, which a hook
    flattens once per forward (`hooks.metadata`).
    """

    _uses_native_fa4: ClassVar[bool] = True

    def native_fa4_documents(
        self, batch: Mapping[str, Any], *, batch_size: int, sequence_length: int
    ) -> PackedDocuments | None:
        """Return flat indices and offsets of this batch; see `packed_documents`."""
        return packed_documents(batch, batch_size=batch_size, sequence_length=sequence_length)


class RecurrentPackingMixin:
    """Declares that recurrent state restarts at each document, so the unpadded bundle is needed."""

    requires_packed_sequence_metadata: ClassVar[bool] = True

    def recurrent_documents(
        self, batch: Mapping[str, Any], *, batch_size: int, sequence_length: int
    ) -> PackedDocuments | None:
        """Return flat indices and offsets of this batch; see `packed_documents`."""
        return packed_documents(batch, batch_size=batch_size, sequence_length=sequence_length)


class DocumentIdsMixin:
    """Declares that the model makes its own masks from the document map."""

    packed_mask_type: ClassVar[PackedMaskType] = "document_ids"

    def masked_documents(
        self, batch: Mapping[str, Any], *, batch_size: int, sequence_length: int
    ) -> PackedDocuments | None:
        """Return flat indices and offsets of this batch; see `packed_documents`."""
        return packed_documents(batch, batch_size=batch_size, sequence_length=sequence_length)


class HFDispatchMixin:
    """Declares that attention is dispatched by the key of the config, whatever `backend.attn` says."""

    _uses_hf_attention: ClassVar[bool] = True

    def varlen_kwargs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the four varlen kwargs of this batch, from the batch or from its document map.

        Args:
            batch: keyword arguments of the forward.

        Returns:
            The kwargs to hand to every attention layer; empty where the batch holds no boundaries.

        Raises:
            ContractError: some of the four without the others.
        """
        present = [name for name in VARLEN_KEYS if batch.get(name) is not None]
        if present:
            if len(present) < len(VARLEN_KEYS):
                raise ContractError(
                    f"Only {present} of the varlen kwargs {list(VARLEN_KEYS)} came; transformers ignores an "
                    "incomplete set and the documents would see each other. Pass all four."
                )
            return {name: batch[name] for name in VARLEN_KEYS}
        document_map = batch.get(DOCUMENT_MAP_KEY)
        return {} if document_map is None else varlen_kwargs_from_document_map(document_map)
