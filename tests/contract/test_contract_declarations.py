"""Contracts, declarations and mixins, without any model of transformers."""

import pickle
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_neat_packing._compat import FlashAttentionKwargs
from hf_neat_packing.capabilities import configure_packing, get_packing_capabilities
from hf_neat_packing.contract import (
    DEFAULT_PACKED_SEQUENCE_CONTRACT,
    METADATA_KEYS,
    VARLEN_KEYS,
    AttentionBackendSelection,
    HFAttentionConsumer,
    LayerMask,
    NativeFA4Consumer,
    PackedMaskConsumer,
    PackingCapabilities,
    PackingMetadataConsumer,
    as_packing_capabilities,
    requires_metadata,
    resolve_packing_contract,
)
from hf_neat_packing.errors import BoundaryError, ContractError
from hf_neat_packing.metadata import PackedSequenceMetadata, build_packed_sequence_metadata
from hf_neat_packing.mixins import (
    DocumentIdsMixin,
    HFDispatchMixin,
    NativeFA4Mixin,
    RecurrentPackingMixin,
)

E1 = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])


def test_the_default_contract_is_one_block_causal_mask_and_no_bundle():
    assert DEFAULT_PACKED_SEQUENCE_CONTRACT.packed_mask_type == "block_causal"
    assert DEFAULT_PACKED_SEQUENCE_CONTRACT.requires_packed_sequence_metadata is False


def test_the_key_names_are_those_of_the_libraries_that_read_them():
    assert set(VARLEN_KEYS) <= set(FlashAttentionKwargs.__annotations__)
    assert set(METADATA_KEYS) == set(PackedSequenceMetadata.__annotations__)
    assert not set(VARLEN_KEYS) & set(METADATA_KEYS)


def test_capabilities_are_frozen_pickle_without_a_model_and_print_why():
    capabilities = PackingCapabilities(
        "block_causal",
        requires_packed_sequence_metadata=True,
        attention_key="eager",
        layout="additive_4d",
        layer_masks=(LayerMask(), LayerMask("sliding_attention", "sliding", 4)),
        mask_delivery="dict",
        trace=("transformers has eager_mask registered for 'eager'",),
    )
    with pytest.raises(FrozenInstanceError):
        capabilities.layout = "varlen"
    assert pickle.loads(pickle.dumps(capabilities)) == capabilities
    text = str(capabilities)
    for part in ("additive_4d", "eager", "sliding 4", "dict", "unpadded bundle", "because"):
        assert part in text


@pytest.mark.parametrize(
    ("mask_type", "layout"),
    [("block_causal", "bool_4d"), ("document_ids", "document_ids"), ("flash_varlen", "varlen")],
)
def test_a_mask_type_has_a_plain_layout(mask_type, layout):
    assert PackingCapabilities(mask_type).layout == layout


def test_a_layout_that_does_not_say_the_mask_type_is_refused():
    with pytest.raises(ContractError, match="bool_4d"):
        PackingCapabilities("flash_varlen", layout="bool_4d")


@pytest.mark.parametrize(
    ("kind", "size"), [("full", 4), ("recurrent", 4), ("sliding", None), ("chunked", 0)]
)
def test_a_layer_mask_needs_the_size_of_its_kind(kind, size):
    with pytest.raises(ContractError, match=kind):
        LayerMask("x", kind, size)


def test_any_object_with_the_two_attributes_is_a_contract():
    structural = SimpleNamespace(
        packed_mask_type="document_ids", requires_packed_sequence_metadata=True
    )
    capabilities = as_packing_capabilities(structural)
    assert capabilities.layout == "document_ids"
    assert capabilities.requires_packed_sequence_metadata is True
    assert as_packing_capabilities(capabilities) is capabilities
    assert as_packing_capabilities(DEFAULT_PACKED_SEQUENCE_CONTRACT).layout == "bool_4d"


def test_both_spellings_of_the_metadata_flag_are_read():
    newer = SimpleNamespace(packed_mask_type="flash_varlen", return_packed_sequence_metadata=True)
    assert as_packing_capabilities(newer).requires_packed_sequence_metadata is True
    assert requires_metadata(SimpleNamespace(requires_packed_sequence_metadata=True)) is True
    assert requires_metadata(object()) is False


@pytest.mark.parametrize(
    "attributes",
    [
        {"requires_packed_sequence_metadata": "yes"},
        {"return_packed_sequence_metadata": 1},
        {"requires_packed_sequence_metadata": True, "return_packed_sequence_metadata": False},
    ],
)
def test_a_flag_that_is_no_bool_or_contradicts_itself_is_refused(attributes):
    with pytest.raises(ContractError, match="one flag"):
        requires_metadata(SimpleNamespace(**attributes))


@pytest.mark.parametrize("mask_type", ["causal", None, "BLOCK_CAUSAL"])
def test_an_unknown_mask_type_names_the_accepted_ones(mask_type):
    with pytest.raises(ContractError, match=r"block_causal.*document_ids.*flash_varlen"):
        as_packing_capabilities(SimpleNamespace(packed_mask_type=mask_type))
    with pytest.raises(ContractError, match="accepted"):
        PackingCapabilities(mask_type)


def test_without_the_deprecated_keyword_the_contract_is_handed_on():
    contract = PackingCapabilities("document_ids")
    assert resolve_packing_contract(contract, None) is contract


def test_an_explicit_contract_wins_over_the_deprecated_keyword():
    contract = PackingCapabilities("document_ids")
    with pytest.warns(DeprecationWarning, match="attn_implementation"):
        assert resolve_packing_contract(contract, "flash_attention_2") is contract


def test_a_contract_that_equals_the_default_is_still_explicit():
    equal = PackingCapabilities("block_causal")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert resolve_packing_contract(equal, "flash_attention_2") is equal


@pytest.mark.parametrize(
    ("name", "mask_type", "layout"),
    [
        ("flash_attention_2", "flash_varlen", "varlen"),
        ("flash_attention_3", "flash_varlen", "varlen"),
        ("flash_attention_4", "flash_varlen", "varlen"),
        ("neat_varlen", "flash_varlen", "varlen"),
        ("sdpa", "block_causal", "bool_4d"),
        ("te", "block_causal", "bool_4d"),
        ("fa4", "block_causal", "bool_4d"),
        ("some_future_backend", "block_causal", "bool_4d"),
        # A boolean mask under eager masks nothing at all.
        ("eager", "block_causal", "additive_4d"),
        ("flex_attention", "block_causal", "block_mask"),
    ],
)
def test_the_deprecated_keyword_table(name, mask_type, layout):
    with pytest.warns(DeprecationWarning, match="deprecated"):
        contract = resolve_packing_contract(DEFAULT_PACKED_SEQUENCE_CONTRACT, name)
    assert contract.packed_mask_type == mask_type
    assert contract.layout == layout
    assert contract.requires_packed_sequence_metadata is False


class Everything(
    NativeFA4Mixin, RecurrentPackingMixin, DocumentIdsMixin, HFDispatchMixin, nn.Module
):
    def forward(self, input_ids, **kwargs):
        return input_ids


def test_mixins_add_attributes_and_one_method_each_and_nothing_else():
    for mixin in (NativeFA4Mixin, RecurrentPackingMixin, DocumentIdsMixin, HFDispatchMixin):
        own = {name for name in vars(mixin) if not name.startswith("__")}
        methods = {name for name in own if callable(getattr(mixin, name))}
        assert len(methods) == 1
        assert len(own - methods) == 1
        assert "__init__" not in vars(mixin)
        assert not hasattr(mixin, "forward")


def test_what_the_mixins_declare_satisfies_the_protocols():
    model = Everything()
    for protocol in (
        NativeFA4Consumer,
        PackedMaskConsumer,
        PackingMetadataConsumer,
        HFAttentionConsumer,
    ):
        assert isinstance(model, protocol)
    assert isinstance(SimpleNamespace(attn="te"), AttentionBackendSelection)
    assert not isinstance(nn.Linear(1, 1), NativeFA4Consumer)


@pytest.mark.parametrize(
    "method", ["native_fa4_documents", "recurrent_documents", "masked_documents"]
)
@pytest.mark.parametrize("form", ["bundle", "flat bundle", "map", "indexed mask"])
def test_a_mixin_reads_the_flat_stream_from_any_form_of_the_boundaries(method, form):
    bundle = build_packed_sequence_metadata(E1)
    flat = {
        "packed_token_indices": torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]),
        "cu_seqlens": torch.tensor([0, 2, 5, 6, 8, 11], dtype=torch.int32),
    }
    batch = {
        "bundle": bundle,
        "flat bundle": flat,
        "map": {"_packed_seq_ids": E1},
        "indexed mask": {"attention_mask": E1},
    }[form]
    got = getattr(Everything(), method)(batch, batch_size=2, sequence_length=6)
    assert got.indices.tolist() == flat["packed_token_indices"].tolist()
    assert got.cu_seqlens.tolist() == flat["cu_seqlens"].tolist()
    assert got.max_seqlen == 3


def test_a_mixin_says_none_where_a_batch_has_no_boundaries():
    assert Everything().recurrent_documents({}, batch_size=1, sequence_length=4) is None
    four_d = {"attention_mask": torch.ones(1, 1, 4, 4)}
    assert Everything().recurrent_documents(four_d, batch_size=1, sequence_length=4) is None
    assert Everything().varlen_kwargs({}) == {}


def test_a_mixin_refuses_half_a_bundle_and_a_map_of_other_tokens():
    with pytest.raises(ContractError, match="cu_seqlens"):
        Everything().recurrent_documents(
            {"packed_token_indices": torch.tensor([[0, 1]])}, batch_size=1, sequence_length=2
        )
    with pytest.raises(ContractError, match="2 rows"):
        Everything().recurrent_documents(
            {"_packed_seq_ids": E1[:1]}, batch_size=2, sequence_length=6
        )
    with pytest.raises(BoundaryError, match="microbatch"):
        Everything().recurrent_documents(
            build_packed_sequence_metadata(E1), batch_size=1, sequence_length=6
        )


def test_the_dispatch_mixin_hands_out_all_four_varlen_kwargs_or_raises():
    model = Everything()
    from_map = model.varlen_kwargs({"_packed_seq_ids": E1})
    assert from_map["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert model.varlen_kwargs(from_map) == from_map
    del from_map["max_length_k"]
    with pytest.raises(ContractError, match="Pass all four"):
        model.varlen_kwargs(from_map)


def test_declarations_are_read_through_wrappers():
    from torch.optim.swa_utils import AveragedModel

    class Declares(RecurrentPackingMixin, DocumentIdsMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, **kwargs):
            return self.layer(x)

    model = Declares()
    wrapped = [
        nn.DataParallel(model),
        AveragedModel(model),
        torch.compile(model, backend="eager"),
        torch.compile(nn.DataParallel(model), backend="eager"),
        SimpleNamespace(module=model),
    ]
    for wrapper in wrapped:
        capabilities = get_packing_capabilities("sdpa", wrapper)
        assert capabilities.packed_mask_type == "document_ids"
        assert capabilities.requires_packed_sequence_metadata is True
    assert configure_packing("sdpa", wrapped[3]).packed_mask_type == "document_ids"
