"""Exactly the keys that each contract asks for, and never those of another."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.contract import METADATA_KEYS, VARLEN_KEYS, PackingCapabilities

ALWAYS = {"input_ids", "labels", "position_ids", "_packed_seq_ids"}
OF_TYPE = {
    "block_causal": {"attention_mask"},
    "document_ids": {"attention_mask"},
    "flash_varlen": set(VARLEN_KEYS),
}
PACKS = [
    [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}],
    [{"input_ids": [5]}, {"input_ids": [6, 7]}, {"input_ids": [8, 9, 10]}],
]
E1 = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]


def batch_for(mask_type, *, metadata=False, packs=PACKS, **options):
    contract = SimpleNamespace(
        packed_mask_type=mask_type, requires_packed_sequence_metadata=metadata
    )
    return DataCollatorForNeatPacking(contract=contract, rows="packs", **options)(packs)


@pytest.mark.parametrize("mask_type", OF_TYPE)
@pytest.mark.parametrize("metadata", [False, True])
def test_a_batch_holds_the_keys_of_its_contract_and_no_other(mask_type, metadata):
    batch = batch_for(mask_type, metadata=metadata)
    bundle = set(METADATA_KEYS) if metadata else set()
    assert batch.keys() == ALWAYS | OF_TYPE[mask_type] | bundle
    assert batch["_packed_seq_ids"].tolist() == E1


def test_block_causal_is_one_boolean_mask_that_shows_no_document_another():
    mask = batch_for("block_causal")["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 6, 6))
    ids = torch.tensor(E1)
    for row, query, key in itertools.product(range(2), range(6), range(6)):
        same = ids[row, query] == ids[row, key] and ids[row, query] > 0
        expected = bool(same and key <= query)
        # A padding token sees itself alone, so that no softmax is empty.
        expected |= bool(ids[row, query] == 0 and key == query)
        assert bool(mask[row, 0, query, key]) is expected


def test_document_ids_are_the_map_itself():
    batch = batch_for("document_ids")
    assert batch["attention_mask"].tolist() == batch["_packed_seq_ids"].tolist() == E1
    assert not batch["attention_mask"].is_floating_point()


def test_flash_varlen_is_the_full_stream_and_never_a_mask():
    batch = batch_for("flash_varlen")
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert [type(batch[name]) for name in VARLEN_KEYS[2:]] == [int, int]
    assert batch["max_length_q"] == batch["max_length_k"] == 3


def test_one_document_still_has_its_map():
    # By value a lone document looks like a padding mask, so the map must always be there.
    for mask_type in OF_TYPE:
        batch = batch_for(mask_type, packs=[[{"input_ids": [5, 6]}]])
        assert batch["_packed_seq_ids"].tolist() == [[1, 1]]


def test_the_layouts_share_their_map_and_nothing_that_could_be_mistaken():
    varlen = batch_for("flash_varlen")
    native = batch_for("document_ids", metadata=True)
    assert torch.equal(varlen["_packed_seq_ids"], native["_packed_seq_ids"])
    assert not (varlen.keys() - ALWAYS) & (native.keys() - ALWAYS)


def test_both_spellings_of_the_flag_bring_the_bundle():
    newer = SimpleNamespace(packed_mask_type="flash_varlen", return_packed_sequence_metadata=True)
    batch = DataCollatorForNeatPacking(contract=newer, rows="packs")(PACKS)
    assert set(METADATA_KEYS) <= batch.keys()


def test_the_collator_of_a_model_travels_without_it():
    import pickle

    collator = DataCollatorForNeatPacking(
        contract=PackingCapabilities("flash_varlen", requires_packed_sequence_metadata=True)
    )
    again = pickle.loads(pickle.dumps(collator))
    assert again.capabilities == collator.capabilities
    assert again(PACKS).keys() == collator(PACKS).keys()
