"""`DataCollatorForNeatPacking`: documents or packs in, the batch that this model needs out.

The collator follows a contract (`PackingCapabilities`), not a name list. It holds no model, so it
pickles into loader workers.

Legend: `B` rows, `S` tokens in a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from ._compat import DataCollatorWithFlattening
from .columns import ColumnRule
from .contract import (
    DOCUMENT_MAP_KEY,
    PackedSequenceContract,
    varlen_kwargs,
)
from .errors import ColumnError, ContractError
from .features import Document, split_packs
from .isolation import isolation_of
from .isolation.long_range import require_one_rotary_table, rotary_limit
from .joined_batch import join_packed_batch
from .loss_labels import (
    IGNORE_INDEX,
    MaskTokens,
    mark_documents,
    mask_documents,
    require_loss_options,
)
from .masks import masks_for
from .metadata import build_packed_sequence_metadata
from .model_needs import accepted_keys, label_rule, num_positions, resolve_capabilities
from .multimodal import PositionIndex, media_layout
from .offsets import pad_offsets
from .packed_batch import PackedBatch, pack_rows
from .planning import plan_packing
from .wrappers import unwrap


class DataCollatorForNeatPacking(DataCollatorWithFlattening):  # type: ignore[misc]
    """Pack documents into rows and say where each begins, in the form that the model reads.

    Features are documents (`input_ids` and other columns), packs (nested columns, one inner list per
    document, as `pack_dataset` yields) or lists of documents. The batch holds:

    * `input_ids`, `labels`, `position_ids`: int64 `[B, S]`. The first label of each document is
      `separator_id`; labels are the input ids where the data has none. Positions restart. Models
      that number tokens on several axes get `[4, B, S]`: plain positions, time, height, width.
    * `_packed_seq_ids`: the document map `[B, S]`, 1-based in each row, 0 = padding.
    * for attention that reads offsets: `cu_seq_lens_q`, `cu_seq_lens_k` (int32 `[segments + 1]`),
      `max_length_q`, `max_length_k` (Python ints), and no `attention_mask`;
    * for `sdpa`, `eager` and `flex_attention`: `attention_mask`, 4-D, one per layer type where the
      model takes several;
    * `seq_idx` and the unpadded bundle where the contract asks for them;
    * every other column by its rule: per token `[B, S]`, per document `[N]`, media joined in
      document order, with no key where no document has any.

    Args:
        model: the built model; what it needs is read once, and the model is not kept. Without a
            model and a contract the batch is for `neat_varlen` and the flash keys.
        contract: what `configure_packing` returned, or any object with the two attributes of
            `PackedSequenceContract`; instead of `model`.
        row_length: fixed tokens of a row. Packs lie one to a row; single documents are packed
            into as few rows as best-fit decreasing needs.
        pad_to_multiple_of: round rows up to a multiple of this.
        max_documents: give every batch the same shapes, for one compiled graph: offsets have room for this many
            documents (padding counts as one), and the longest is said to be `row_length`, which must be given.
        pad_token_id: token id of the padding tail.
        columns: rules for further columns, by name: a `ColumnRule` or its kind.
        rows: `flat` joins the batch into one row, `packs` gives each feature a row of its own.
            Default: packs get rows of their own where a 4-D mask would grow with the square of the
            joined row, or where `row_length` is given; everything else is joined.
        separator_id: label of each document's first token, where the loss shifts.
        shifted_labels: whether the loss compares each token with the next one's label; default: what `isolate`
            measured, else what the model's `loss_type` says. A loss that does not shift keeps the first label
            of every document, and no labels are made for it.
        position_ids_start: position of a document's first token; default: the model's.
        position_index: numbers the tokens of one document on several axes; default: the model's own
            `get_rope_index`. A function from its columns to int64 `[rows, tokens]`.
        join_documents: let documents of a row see each other: True for whole rows, or the name of a
            per-document column (`conversation_id`) whose equal values belong together.
        loss_per: `document` writes labels for `per_document_loss`, which the Trainer needs as its
            `compute_loss_func`; no other loss can read them.
        mask_tokens: masks tokens for masked language modelling: from `input_ids` and
            `special_tokens_mask`, both `[B, S]`, to masked `input_ids` and `labels`, as
            `DataCollatorForLanguageModeling(tokenizer).torch_mask_tokens` does. The tail is left alone.
        return_seq_idx: add `seq_idx`; default: where the contract asks for it.
        return_position_ids: leave False for models without positions.
        return_flash_attn_kwargs: must stay True; packed rows without boundaries would mix.
        attn_implementation: deprecated, use `model`.
        return_tensors: `pt`, the only form.

    Raises:
        ContractError: a contract and a model, or options that would lose the boundaries.
        UnsupportedModelError: a model that cannot take packed rows.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        contract: PackedSequenceContract | None = None,
        row_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        max_documents: int | None = None,
        pad_token_id: int = 0,
        columns: Mapping[str, ColumnRule | str] | None = None,
        rows: Literal["flat", "packs"] | None = None,
        separator_id: int = IGNORE_INDEX,
        shifted_labels: bool | None = None,
        position_ids_start: int | None = None,
        position_index: PositionIndex | None = None,
        join_documents: bool | str = False,
        loss_per: Literal["token", "document"] = "token",
        mask_tokens: MaskTokens | None = None,
        return_seq_idx: bool | None = None,
        return_position_ids: bool = True,
        return_flash_attn_kwargs: bool = True,
        attn_implementation: str | None = None,
        return_tensors: str = "pt",
    ) -> None:
        if model is not None and contract is not None:
            raise ContractError(
                "Both `model` and `contract` were given; the contract is read from the model. Pass one of them."
            )
        if not return_flash_attn_kwargs or return_tensors != "pt":
            raise ContractError(
                f"return_flash_attn_kwargs={return_flash_attn_kwargs}, return_tensors={return_tensors!r}: a packed "
                "row without boundaries, or without torch tensors, mixes documents. Leave both at their defaults."
            )
        capabilities = resolve_capabilities(model, contract, attn_implementation)
        start = (
            capabilities.position_ids_start if position_ids_start is None else position_ids_start
        )
        super().__init__(
            return_tensors=return_tensors,
            return_position_ids=return_position_ids,
            separator_id=separator_id,
            return_flash_attn_kwargs=True,
            return_seq_idx=capabilities.requires_seq_idx
            if return_seq_idx is None
            else return_seq_idx,
        )
        # The base class takes it as an argument only from transformers 5.24 on.
        self.position_ids_start = start
        self.capabilities = capabilities
        self.row_length = row_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.max_documents = max_documents
        if max_documents is not None and row_length is None:
            raise ContractError(
                f"max_documents={max_documents} promises batches of one shape, but without `row_length` rows are as "
                "long as their documents. Give `row_length` too."
            )
        self.pad_token_id = pad_token_id
        self.join_documents = join_documents
        self.columns = dict(columns or {})
        if isinstance(join_documents, str):
            self.columns.setdefault(join_documents, "document")
        self.rows = rows
        if rows == "flat" and row_length is not None:
            raise ContractError(
                f"rows='flat' joins the whole batch into one row, which row_length={row_length} cannot promise to "
                "hold. Leave `rows` out, or leave `row_length` out."
            )
        loss = getattr(unwrap(model), "loss_type", None) if model is not None else None
        # Labels that are made for one loss decide before the model does.
        made_for = True if loss_per == "document" else shifted_labels
        self.shifts_labels, self.label_rule = label_rule(
            model, made_for if mask_tokens is None else False
        )
        self.accepted_keys = accepted_keys(model, capabilities.packed_mask_type)
        self.num_positions = num_positions(model, start)
        self.loss_per = loss_per
        self.mask_tokens = mask_tokens
        require_loss_options(
            loss_per, mask_tokens, loss, accepted_keys=self.accepted_keys, separator_id=separator_id
        )
        self.media = media_layout(model, position_index)
        plain = model is not None and isolation_of(model) is None
        self.rotary_limit = rotary_limit(unwrap(model)) if plain else None

    def __call__(
        self,
        features: Sequence[Any],
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """Collate one batch.

        Args:
            features: documents, packs or lists of documents.
            return_tensors: `pt` or None.
            separator_id: overrides the collator's.

        Raises:
            ColumnError: columns that cannot be packed, or no token at all.
            UnsupportedModelError: documents for which the model would choose different rotary tables alone.
        """
        if return_tensors not in (None, "pt"):
            raise ContractError(
                f"return_tensors={return_tensors!r}; packed batches are torch tensors ('pt')."
            )
        if not features:
            return {}
        first_label = self.separator_id if separator_id is None else separator_id
        packed = pack_rows(
            *self._rows_of(features),
            columns=self.columns,
            row_length=self.row_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=self.pad_token_id,
            position_ids_start=self.position_ids_start,
            first_label=first_label if self.shifts_labels else None,
            make_labels=self.shifts_labels,
            media=self.media,
            keep=("special_tokens_mask",) if self.mask_tokens is not None else (),
        )
        self._require_positions(packed)
        if self.join_documents:
            by = self.join_documents if isinstance(self.join_documents, str) else None
            packed = join_packed_batch(packed, by, position_start=self.position_ids_start)
        if self.rotary_limit is not None:
            require_one_rotary_table(packed.cu_seqlens.diff().tolist(), self.rotary_limit)
        batch = packed.tokens | packed.per_document | packed.media
        if "label" in packed.per_document and "labels" not in batch:
            # As every collator of transformers names it for the model.
            batch["labels"] = batch.pop("label")
        if self.mask_tokens is not None:
            batch |= mask_documents(self.mask_tokens, batch, packed.document_map)
        if self.loss_per == "document":
            batch |= mark_documents(batch["labels"], packed.document_map)
        if self.return_position_ids:
            batch["position_ids"] = packed.position_ids
        batch |= self._boundaries(packed)
        if self.accepted_keys is not None:
            batch = {name: value for name, value in batch.items() if name in self.accepted_keys}
        return batch

    def _rows_of(self, features: Sequence[Any]) -> tuple[list[Document], list[int]]:
        """Give the documents in order of rows, and how many lie in each row."""
        documents, packs, counts = split_packs(features)
        reads_offsets = self.capabilities.packed_mask_type == "flash_varlen"
        if self.rows == "packs" or (self.rows is None and packs and not reads_offsets):
            return documents, counts
        if self.row_length is None:
            return documents, [len(documents)]
        if packs:
            return documents, counts
        lengths = [len(document["input_ids"]) for document in documents]
        plan = plan_packing(lengths, self.row_length, strategy="bfd")
        in_order = [documents[number] for number in plan.indices.tolist()]
        return in_order, np.diff(plan.offsets).tolist()

    def _require_positions(self, packed: PackedBatch) -> None:
        if self.num_positions is None:
            return
        longest = max(map(max, packed.lengths))
        if self.position_ids_start + longest > self.num_positions:
            raise ColumnError(
                f"A document of {longest} tokens is longer than the model's table of positions: "
                f"max_position_embeddings={self.num_positions}, of which the first {self.position_ids_start} are for "
                f"padding. Cut documents to {self.num_positions - self.position_ids_start} tokens."
            )

    def _boundaries(self, packed: PackedBatch) -> dict[str, Any]:
        """Say where documents begin, in the form of the contract."""
        document_map = packed.document_map
        keys: dict[str, Any] = {DOCUMENT_MAP_KEY: document_map}
        if self.capabilities.packed_mask_type == "flash_varlen":
            keys |= self._offsets(packed)
        elif self.capabilities.packed_mask_type == "document_ids":
            keys["attention_mask"] = document_map
        else:
            masks = masks_for(document_map, self.capabilities)
            if self.media.own_masks is not None:
                masks = self.media.own_masks.overlay(
                    masks, packed.tokens, packed.lengths, self.capabilities
                )
            keys["attention_mask"] = masks
        if self.return_seq_idx:
            keys["seq_idx"] = packed.seq_idx
        if self.capabilities.requires_packed_sequence_metadata:
            keys |= build_packed_sequence_metadata(document_map)
        return keys

    def _offsets(self, packed: PackedBatch) -> dict[str, Any]:
        if self.max_documents is None or self.row_length is None:
            return varlen_kwargs(packed.cu_seqlens, packed.max_seqlen)
        width = packed.document_map.shape[1]
        return varlen_kwargs(pad_offsets(packed.cu_seqlens, self.max_documents), width)
