"""What the entry hooks hand to a model, and what they refuse."""

import copy
import threading

import pytest
import torch
from contract_exactness import assert_as_exact_as_alone, double, tiny_llama
from torch import nn

from hf_neat_packing.capabilities import configure_packing, configure_packing_for_models
from hf_neat_packing.contract import VARLEN_KEYS, varlen_kwargs_from_document_map
from hf_neat_packing.errors import BoundaryError, ContractError
from hf_neat_packing.hooks.metadata import (
    entry_hook,
    install_dense_mask_hook,
    install_native_fa4_metadata_hook,
    install_strip_metadata_hook,
    install_varlen_rebuild_hook,
    remove_entry_hook,
)
from hf_neat_packing.metadata import build_packed_sequence_metadata

E1 = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])
IDS = torch.arange(12).reshape(2, 6)
INSTALLERS = [
    install_dense_mask_hook,
    install_native_fa4_metadata_hook,
    install_strip_metadata_hook,
    install_varlen_rebuild_hook,
]


class Recorder(nn.Module):
    """Remembers what its forward was called with."""

    def forward(self, input_ids, **kwargs):
        self.seen = kwargs
        return input_ids


def seen_by(install, **kwargs):
    model = Recorder()
    install(model)
    model(IDS, **kwargs)
    return model.seen


def test_the_bundle_arrives_flat_and_the_callers_batch_keeps_its_form():
    batch = {**build_packed_sequence_metadata(E1), "attention_mask": E1}
    before = copy.deepcopy(batch)
    seen = seen_by(install_native_fa4_metadata_hook, **batch)
    assert seen["packed_token_indices"].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert seen["cu_seqlens"].tolist() == [0, 2, 5, 6, 8, 11]
    assert seen["cu_seqlens"].dtype == torch.int32
    assert seen["max_seqlen"] == 3
    assert seen["attention_mask"] is batch["attention_mask"]
    for name, value in before.items():
        assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value))


@pytest.mark.parametrize("install", INSTALLERS)
def test_a_second_forward_of_the_same_batch_sees_the_same(install):
    model = Recorder()
    install(model)
    batch = {**build_packed_sequence_metadata(E1), "_packed_seq_ids": E1}
    model(IDS, **batch)
    first = model.seen
    model(IDS, **batch)
    assert first.keys() == model.seen.keys()
    for name, value in first.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(model.seen[name]))


def test_a_flat_bundle_is_checked_and_passes():
    flat = {"packed_token_indices": torch.tensor([5, 7]), "cu_seqlens": torch.tensor([0, 2])}
    seen = seen_by(install_native_fa4_metadata_hook, **flat)
    assert seen["packed_token_indices"].tolist() == [5, 7]
    assert seen["cu_seqlens"] is flat["cu_seqlens"]


@pytest.mark.parametrize("install", INSTALLERS)
def test_a_plain_batch_passes_untouched(install):
    mask = torch.ones(2, 6, dtype=torch.long)
    seen = seen_by(install, attention_mask=mask)
    assert seen.keys() == {"attention_mask"}
    assert seen["attention_mask"] is mask


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"qkv_format": "thd"}, "thd"),
        ({"qkv_format": "thd", **build_packed_sequence_metadata(E1)}, "thd"),
        ({"packed_token_indices": torch.tensor([[0, 1]])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([[0, 1]])}, "packed_token_indices"),
        ({"packed_token_indices": [0], "cu_seqlens": [0, 1]}, "list"),
        (build_packed_sequence_metadata(E1[:1]), "microbatch of 2 rows"),
        (build_packed_sequence_metadata(E1[:, :5]), "microbatch of 2 rows of 6"),
        (
            {
                "packed_token_indices": torch.full((2, 6), -1),
                "cu_seqlens": torch.tensor([[0, -1], [0, -1]]),
            },
            "all-padding",
        ),
        (
            {
                **build_packed_sequence_metadata(E1),
                "cu_seqlens": torch.tensor([[0, 2, 6, -1], [0, 1, 3, 5]]),
            },
            "Row 0",
        ),
    ],
)
def test_native_fa4_refuses_what_it_cannot_flatten(kwargs, word):
    with pytest.raises(ValueError, match=word):
        seen_by(install_native_fa4_metadata_hook, **kwargs)


@pytest.mark.parametrize("install", [install_strip_metadata_hook, install_dense_mask_hook])
def test_an_unused_bundle_is_stripped(install):
    seen = seen_by(install, **build_packed_sequence_metadata(E1), labels=IDS)
    assert seen.keys() == {"labels"}


def test_c07_document_numbers_are_refused_where_masks_are_cast_to_bool():
    with pytest.raises(ContractError, match="attention_mask"):
        seen_by(install_dense_mask_hook, attention_mask=E1)
    # A model that makes its own masks reads them.
    assert seen_by(install_strip_metadata_hook, attention_mask=E1)["attention_mask"] is E1
    dense = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    assert seen_by(install_dense_mask_hook, attention_mask=dense)["attention_mask"] is dense


@pytest.mark.parametrize("key", ["sdpa", "eager", "neat_varlen"])
def test_c07_a_configured_model_reads_document_numbers_exactly_or_refuses_them(key):
    model = tiny_llama(key).eval()
    document_map = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0]])
    ids = torch.arange(10, 18)[None]
    configure_packing_for_models([model])
    if key != "neat_varlen":
        with pytest.raises(ContractError, match="attention_mask"):
            model(input_ids=ids, attention_mask=document_map)
        return
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 0, 1]])
    packed = model(input_ids=ids, attention_mask=document_map, position_ids=positions).logits
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        alone = model(input_ids=ids[:, start:stop]).logits
        truth = double(model)(input_ids=ids[:, start:stop]).logits
        assert_as_exact_as_alone(packed[:, start:stop], alone, truth)


def test_a_genuine_thd_batch_passes_as_the_same_objects():
    batch = {"cu_seqlens": torch.tensor([0, 12]), "max_seqlen": torch.tensor(12)}
    seen = seen_by(install_strip_metadata_hook, **batch)
    assert all(seen[name] is value for name, value in batch.items())


def test_a_tensor_max_seqlen_is_somebody_elses_and_stays():
    batch = {**build_packed_sequence_metadata(E1), "max_seqlen": torch.tensor(3)}
    assert seen_by(install_strip_metadata_hook, **batch).keys() == {"max_seqlen"}


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_varlen_kwargs_are_those_of_the_microbatch_after_a_split(rows):
    model = Recorder()
    install_varlen_rebuild_hook(model)
    whole = varlen_kwargs_from_document_map(E1)
    model(IDS[rows], **whole, _packed_seq_ids=E1[rows])
    expected = varlen_kwargs_from_document_map(E1[rows])
    assert model.seen["cu_seq_lens_q"].tolist() == expected["cu_seq_lens_q"].tolist()
    assert model.seen["max_length_q"] == expected["max_length_q"]
    assert whole["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]


def test_c07_an_indexed_mask_becomes_the_map_and_the_offsets():
    seen = seen_by(install_varlen_rebuild_hook, attention_mask=E1)
    assert "attention_mask" not in seen
    assert seen["_packed_seq_ids"] is E1
    assert seen["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]


@pytest.mark.parametrize("mask", [E1, (E1 != 0).long(), E1 != 0])
def test_a_mask_that_agrees_with_the_map_is_dropped_so_that_it_cannot_win(mask):
    seen = seen_by(install_varlen_rebuild_hook, attention_mask=mask, _packed_seq_ids=E1)
    assert "attention_mask" not in seen
    assert seen["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 6, dtype=torch.long),
        torch.where(E1 == 2, 1, E1),
        torch.ones(2, 1, 6, 6, dtype=torch.bool),
        torch.ones(2, 5, dtype=torch.long),
        {"full_attention": None},
    ],
)
def test_a_mask_that_contradicts_the_map_is_refused(mask):
    with pytest.raises(ContractError, match="attention_mask"):
        seen_by(install_varlen_rebuild_hook, attention_mask=mask, _packed_seq_ids=E1)


def test_offsets_without_a_map_must_be_complete_and_cover_this_microbatch():
    whole = varlen_kwargs_from_document_map(E1)
    assert seen_by(install_varlen_rebuild_hook, **whole).keys() == set(VARLEN_KEYS)
    for missing in VARLEN_KEYS:
        partial = {name: value for name, value in whole.items() if name != missing}
        with pytest.raises(ContractError, match="incomplete"):
            seen_by(install_varlen_rebuild_hook, **partial)
    for part in ([0, 2, 5, 6], [7, 9, 12]):
        cut = torch.tensor(part, dtype=torch.int32)
        with pytest.raises(BoundaryError, match="cu_seq_lens_q"):
            seen_by(install_varlen_rebuild_hook, **{**whole, "cu_seq_lens_q": cut})


@pytest.mark.parametrize("document_map", [E1[:1], E1[:, :5], E1.flatten()])
def test_a_map_of_other_tokens_is_refused(document_map):
    with pytest.raises(ContractError, match="microbatch"):
        seen_by(install_varlen_rebuild_hook, _packed_seq_ids=document_map)


def test_an_all_padding_microbatch_says_so():
    with pytest.raises(BoundaryError, match="padding"):
        seen_by(install_varlen_rebuild_hook, _packed_seq_ids=torch.zeros_like(E1))


def test_the_bundle_never_reaches_a_varlen_model():
    batch = {**build_packed_sequence_metadata(E1), "_packed_seq_ids": E1}
    assert seen_by(install_varlen_rebuild_hook, **batch).keys() == {*VARLEN_KEYS, "_packed_seq_ids"}


@pytest.mark.parametrize("install", INSTALLERS)
def test_hooks_are_installed_once_and_come_off(install):
    model = Recorder()
    handle = install(model)
    assert install(nn.DataParallel(model)) is handle
    assert len(model._forward_pre_hooks) == 1
    handle.remove()
    handle.remove()
    assert not model._forward_pre_hooks
    assert entry_hook(model) is None
    with install(model) as again:
        assert again is not handle
        assert entry_hook(model) is again
    assert not model._forward_pre_hooks
    remove_entry_hook(model)


def test_hooks_leave_foreign_hooks_and_the_state_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(lambda module, args: None)
    keys = list(model.state_dict())
    with install_strip_metadata_hook(model):
        assert list(model.state_dict()) == keys
        assert len(model._forward_pre_hooks) == 2
    assert len(model._forward_pre_hooks) == 1


def test_a_copied_model_carries_a_hook_of_its_own():
    model = Recorder()
    install_strip_metadata_hook(model)
    twin = copy.deepcopy(model)
    remove_entry_hook(twin)
    assert len(model._forward_pre_hooks) == 1
    assert not twin._forward_pre_hooks


def test_metadata_rides_with_the_call_so_threads_do_not_mix_it():
    results = {}

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = threading.Barrier(2)

        def forward(self, input_ids, **kwargs):
            self.gate.wait(timeout=60)
            return kwargs["cu_seq_lens_q"].tolist()

    slow = Slow()
    install_varlen_rebuild_hook(slow)

    def run(name, document_map):
        results[name] = slow(IDS[:1], _packed_seq_ids=document_map)

    threads = [
        threading.Thread(target=run, args=("first", E1[:1])),
        threading.Thread(target=run, args=("second", E1[1:])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"first": [0, 2, 5, 6], "second": [0, 1, 3, 6]}


def test_hooks_fire_inside_compiled_models():
    compiled = Recorder()
    configure_packing("neat_varlen", compiled)
    torch.compile(compiled, backend="eager")(IDS, _packed_seq_ids=E1)
    assert compiled.seen["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    torch._dynamo.reset()
