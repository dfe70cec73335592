"""Membership inside a row: tokens left out of attention, documents joined so that they see each other.

Two pure functions of `membership` do the work: `select_membership` takes tokens out, `join_documents` lets
documents of a row (or of a group in it, such as the turns of one conversation) see each other and moves
their positions apart. `adapt_model_inputs` and `enable_xdoc_attention` do the same to a batch that an external
loader has packed, under the names that NeMo AutoModel documents. Tensors are replaced, never written into.

Whatever follows a document (masks, offsets, restarts of recurrent state) must be built from the selected
membership, after the last change to it: `selected_boundaries` does.

Legend: `B` rows, `S` tokens in a row, `N` documents, `A` position axes.
"""

from typing import Any, NotRequired, TypedDict

from torch import Tensor

from .contract import (
    DOCUMENT_MAP_KEY,
    METADATA_KEYS,
    PackedSequenceContract,
    as_packing_capabilities,
    requires_metadata,
)
from .documents import host_map
from .errors import ContractError
from .membership import group_map, join_documents, select_membership
from .metadata import build_packed_sequence_metadata

__all__ = [
    "TrainingBatch",
    "adapt_model_inputs",
    "enable_xdoc_attention",
    "group_map",
    "join_documents",
    "require_supported_packing_contract",
    "select_membership",
    "selected_boundaries",
]


class TrainingBatch(TypedDict):
    """A packed batch on the host. Token fields are `[B, S]`.

    Attributes:
        input_ids: token ids.
        labels: targets, already aligned to the tokens that predict them.
        padding_mask: True at padding.
        position_ids: `[B, S]`, or `[A, B, S]` with several axes.
        document_ids: int64, the documents as they were packed, 0 at padding.
        attention_document_ids: int64, the selected membership: 0 also where a token is left out.
        attention_mask: what the model takes as a mask.
        _packed_seq_ids: the document map that travels with the batch.
        packed_token_indices: see `PackedSequenceMetadata`.
        cu_seqlens: see `PackedSequenceMetadata`; without the indices, offsets of the loader's own.
        max_seqlen: tokens of the longest document.
        qkv_format: layout that a loader chose.
        seq_lens: lengths that a loader wrote.
        seq_lens_padded: lengths with the padding inside documents.
    """

    input_ids: Tensor
    labels: Tensor
    padding_mask: Tensor
    position_ids: Tensor
    document_ids: NotRequired[Tensor]
    attention_document_ids: NotRequired[Tensor]
    attention_mask: NotRequired[Tensor]
    _packed_seq_ids: NotRequired[Tensor]
    packed_token_indices: NotRequired[Tensor]
    cu_seqlens: NotRequired[Tensor]
    max_seqlen: NotRequired[int]
    qkv_format: NotRequired[str]
    seq_lens: NotRequired[Tensor]
    seq_lens_padded: NotRequired[Tensor]


def adapt_model_inputs(
    batch: TrainingBatch, attention_eligibility: Tensor | None = None
) -> TrainingBatch:
    """Select the membership of a batch that a loader has packed: `attention_document_ids`.

    Args:
        batch: with `document_ids` int64 `[B, S]`, aligned to the shifted and padded tokens. The mapping gets
            the new entry; no tensor in it changes.
        attention_eligibility: bool `[B, S]`, False where a processor put a token in; independent of padding.

    Returns:
        The same mapping.

    Raises:
        ContractError: no `document_ids`.
        BoundaryError: an invalid map, or an eligibility of another shape or dtype.
    """
    batch["attention_document_ids"] = select_membership(_document_ids(batch), attention_eligibility)
    return batch


def enable_xdoc_attention(
    batch: TrainingBatch, packing_contract: PackedSequenceContract
) -> TrainingBatch:
    """Let the documents of each row of a batch see each other, and count positions through the row.

    `document_ids` stay as they are. Boundaries are built afterwards, with `selected_boundaries`: recurrent state
    then runs through the row too.

    Args:
        batch: after `adapt_model_inputs`. The mapping gets new entries; no tensor in it changes.
        packing_contract: what the model takes.

    Returns:
        The same mapping.

    Raises:
        ContractError: a contract that is none, no selected membership, boundaries that were built before, or
            tokens left out in the middle of a row of a model that takes varlen offsets.
        BoundaryError: an invalid map, or positions that are not local.
    """
    capabilities = as_packing_capabilities(packing_contract)
    stale = [name for name in (DOCUMENT_MAP_KEY, METADATA_KEYS[0]) if name in batch]
    if stale:
        raise ContractError(
            f"The batch already holds {stale}, built before the documents were joined; the model would follow the old "
            "boundaries. Join first, then build boundaries with `selected_boundaries`."
        )
    if "attention_document_ids" not in batch:
        raise ContractError(
            "The batch has no `attention_document_ids` to join. Call `adapt_model_inputs(batch)` before."
        )
    joined, positions = join_documents(
        _document_ids(batch), batch["position_ids"], membership=batch["attention_document_ids"]
    )
    if capabilities.packed_mask_type == "flash_varlen":
        _require_one_piece(joined)
    batch["attention_document_ids"], batch["position_ids"] = joined, positions
    return batch


def _document_ids(batch: TrainingBatch) -> Tensor:
    if "document_ids" not in batch:
        raise ContractError(
            "The batch has no `document_ids` [batch, sequence], so which document a token belongs to is unknown. "
            "Accepted: int64 numbers from 1 in each row, 0 at padding, aligned to the shifted tokens."
        )
    return batch["document_ids"]


def _require_one_piece(joined: Tensor) -> None:
    host = host_map(joined) != 0
    pieces = (host[:, 1:] & ~host[:, :-1]).sum(1) + host[:, 0]
    if bool((pieces > 1).any()):
        row = int((pieces > 1).nonzero()[0, 0])
        raise ContractError(
            f"Row {row} has tokens that are left out in its middle, so its joined document lies in {int(pieces[row])} "
            "pieces, and the offsets of `flash_varlen` would cut it there. Accepted: `block_causal` or "
            "`document_ids`, whose models take a map; or eligibility at the ends of the row only."
        )


def selected_boundaries(
    batch: TrainingBatch, packing_contract: PackedSequenceContract
) -> dict[str, Any]:
    """Build what a model needs from the selected membership: the map, and the bundle where it asks for one.

    Args:
        batch: after `adapt_model_inputs`, and `enable_xdoc_attention` where documents are joined.
        packing_contract: what the model takes.

    Returns:
        `_packed_seq_ids` `[B, S]`, and the fields of `PackedSequenceMetadata` (offsets of gathered tokens) where
        the contract asks for them. `batch.update(...)` adds them.

    Raises:
        ContractError: a contract that is none, or no selected membership.
        BoundaryError: no token that attends at all.
    """
    capabilities = as_packing_capabilities(packing_contract)
    if "attention_document_ids" not in batch:
        raise ContractError(
            "The batch has no `attention_document_ids`. Call `adapt_model_inputs(batch)` before."
        )
    selected = batch["attention_document_ids"]
    found: dict[str, Any] = {DOCUMENT_MAP_KEY: selected}
    if capabilities.requires_packed_sequence_metadata:
        found.update(build_packed_sequence_metadata(selected))
    return found


def require_supported_packing_contract(packing_contract: Any) -> None:
    """Check once, while a loader is built, that batches can be written for a contract.

    `requires_packed_sequence_metadata` (newer name: `return_packed_sequence_metadata`) asks for the bundle of
    `PackedSequenceMetadata`, whose `cu_seqlens` count gathered tokens. Offsets that a loader writes over whole
    rows, padding included, are something else and are never mixed with it.

    Args:
        packing_contract: any object with the two attributes of `PackedSequenceContract`.

    Raises:
        ContractError: a missing or unknown mask type, or a flag that is missing or no bool.
    """
    as_packing_capabilities(packing_contract)
    names = ("requires_packed_sequence_metadata", "return_packed_sequence_metadata")
    if not any(isinstance(getattr(packing_contract, name, None), bool) for name in names):
        raise ContractError(
            f"{type(packing_contract).__name__} has neither of {list(names)}, so whether its model needs the unpadded "
            "bundle is unknown. Write False if it does not."
        )
    requires_metadata(packing_contract)
