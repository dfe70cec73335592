"""What a built model needs: the tables of resolution, capabilities, validation, configuration."""

import copy
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_neat_packing.capabilities as module_under_test
from hf_neat_packing._compat import registered_mask
from hf_neat_packing.capabilities import (
    configure_packing,
    configure_packing_for_models,
    get_attn_implementation,
    get_model_attn_implementation,
    get_packing_capabilities,
    is_indexed_packed_mask,
    model_capabilities,
    validate_flash_packing_support,
)
from hf_neat_packing.contract import VARLEN_KEYS
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.hooks.metadata import (
    entry_hook,
    flatten_packed_metadata_at_model_entry,
    guard_dense_mask_at_model_entry,
    rebuild_varlen_kwargs_at_model_entry,
    strip_unused_packed_metadata_at_model_entry,
)

FLASH = ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


def model_with(*, backend=None, key=None, forward=None, **declared):
    """A bare module with the given declarations."""

    def takes_anything(self, input_ids=None, **kwargs):
        return input_ids

    cls = type("Custom", (nn.Module,), {"forward": forward or takes_anything, **declared})
    model = cls()
    if backend is not None:
        model.backend = SimpleNamespace(attn=backend)
    if key is not None:
        model.config = SimpleNamespace(_attn_implementation=key)
    return model


def tiny_llama(key="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=key)


@pytest.mark.parametrize(
    ("mask", "indexed"),
    [
        (torch.tensor([[1, 1, 2, 0]]), True),
        (torch.tensor([[1, 1, 0, 0]]), False),
        (torch.tensor([[True, False]]), False),
        (torch.full((1, 1, 2, 2), 2), False),
        (torch.zeros(2, 0, dtype=torch.long), False),
        (torch.tensor([[1.0, 2.0]]), True),
        (None, False),
    ],
)
def test_indexed_mask_table(mask, indexed):
    assert is_indexed_packed_mask(mask) is indexed


@pytest.mark.parametrize(
    ("backend", "key", "uses_hf", "native", "result"),
    [
        ("te", None, None, None, "te"),
        ("te", "sdpa", None, None, "te"),
        (None, "flash_attention_2", None, None, "flash_attention_2"),
        ("fa4", "flash_attention_4", True, None, "flash_attention_4"),
        ("fa4", "sdpa", True, None, "sdpa"),
        ("fa4", "flash_attention_4", None, True, "fa4"),
        ("te", "flash_attention_2", True, None, "flash_attention_2"),
        ("sdpa", "flash_attention_4", None, None, "sdpa"),
        (None, None, None, None, "sdpa"),
        ("te", None, True, None, "sdpa"),
        (None, "magi", None, None, "magi"),
        (None, "some_future_backend", None, None, "some_future_backend"),
    ],
)
def test_resolution_table(backend, key, uses_hf, native, result):
    declared = {"_uses_hf_attention": uses_hf, "_uses_native_fa4": native}
    declared = {name: value for name, value in declared.items() if value is not None}
    model = model_with(backend=backend, key=key, **declared)
    assert get_model_attn_implementation(model) == result
    assert get_model_attn_implementation(nn.DataParallel(model)) == result


@pytest.mark.parametrize(
    ("hub_id", "mainline"),
    [
        ("kernels-community/flash-attn2", "flash_attention_2"),
        ("kernels-community/flash-attn2@v2", "flash_attention_2"),
        ("kernels-community/flash-attn2@v1:fn", "flash_attention_2"),
        ("kernels-community/vllm-flash-attn3", "flash_attention_3"),
        ("kernels-community/flash-attn4", "flash_attention_4"),
        ("someone/unknown-kernel", "someone/unknown-kernel"),
    ],
)
def test_c51_a_hub_id_that_stands_in_for_flash_is_named_as_flash(hub_id, mainline):
    assert get_model_attn_implementation(model_with(key=hub_id)) == mainline


@pytest.mark.parametrize("config", [None, SimpleNamespace(_attn_implementation=None)])
def test_a_missing_key_is_sdpa(config):
    model = model_with()
    if config is not None:
        model.config = config
    assert get_model_attn_implementation(model) == "sdpa"


@pytest.mark.parametrize("thing", [LlamaConfig(), SimpleNamespace(config=None), None, "sdpa"])
def test_a_config_or_namespace_does_not_say_what_was_built(thing):
    with pytest.raises(TypeError, match="built model"):
        get_model_attn_implementation(thing)


def test_the_built_model_counts_and_not_what_was_asked_for():
    model = tiny_llama("sdpa")
    model.config._attn_implementation_requested = "flash_attention_2"
    model.set_attn_implementation("eager")
    assert get_model_attn_implementation(model) == "eager"
    assert model_capabilities(model).layout == "additive_4d"


def test_the_text_part_of_a_composite_config_decides():
    from transformers import LlavaConfig

    config = LlavaConfig()
    config._attn_implementation_internal = "sdpa"
    config.text_config._attn_implementation_internal = "neat_varlen"
    model = model_with()
    model.config = config
    assert get_model_attn_implementation(model) == "neat_varlen"
    capabilities = get_packing_capabilities("neat_varlen", model)
    assert capabilities.layout == "varlen"
    assert "text part" in str(capabilities)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("metadata", [True, False])
def test_flash_names_want_offsets_and_the_bundle_only_if_declared(name, metadata):
    model = model_with(requires_packed_sequence_metadata=metadata)
    capabilities = get_packing_capabilities(name, model=model)
    assert capabilities.packed_mask_type == "flash_varlen"
    assert capabilities.requires_packed_sequence_metadata is metadata
    assert capabilities.uses_native_fa4 is False
    assert get_packing_capabilities(name).packed_mask_type == "flash_varlen"


def test_native_fa4_wants_document_ids_and_always_the_bundle():
    capabilities = get_packing_capabilities("fa4", model_with(_uses_native_fa4=True))
    assert capabilities.packed_mask_type == "document_ids"
    assert capabilities.requires_packed_sequence_metadata is True
    assert capabilities.uses_native_fa4 is True


@pytest.mark.parametrize("model", [None, model_with(), model_with(_uses_native_fa4=False)])
def test_native_fa4_without_the_declaration_is_refused(model):
    with pytest.raises(ContractError, match="NativeFA4Mixin"):
        get_packing_capabilities("fa4", model)


@pytest.mark.parametrize("name", ["sdpa", "te", *FLASH, "neat_varlen"])
def test_a_declared_mask_type_wins_because_the_model_owns_its_masks(name):
    model = model_with(packed_mask_type="document_ids", requires_packed_sequence_metadata=True)
    capabilities = get_packing_capabilities(name, model)
    assert capabilities.packed_mask_type == "document_ids"
    assert capabilities.requires_packed_sequence_metadata is True
    assert "declares" in str(capabilities)


def test_an_unknown_declared_mask_type_is_refused():
    with pytest.raises(ContractError, match="accepted"):
        get_packing_capabilities("sdpa", model_with(packed_mask_type="blocks"))


def test_a_plain_namespace_may_carry_the_declarations():
    namespace = SimpleNamespace(packed_mask_type="document_ids")
    assert get_packing_capabilities("sdpa", namespace).packed_mask_type == "document_ids"
    wrapped = SimpleNamespace(module=namespace)
    assert get_packing_capabilities("sdpa", wrapped).packed_mask_type == "document_ids"


def test_the_newer_spelling_of_the_flag_is_a_declaration_too():
    model = model_with(return_packed_sequence_metadata=True)
    assert get_packing_capabilities("sdpa", model).requires_packed_sequence_metadata is True


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("sdpa", "bool_4d"),
        # Eager adds its mask to the scores, so a boolean one masks nothing.
        ("eager", "additive_4d"),
        ("flex_attention", "block_mask"),
        ("neat_varlen", "varlen"),
        ("neat_varlen:sdpa", "varlen"),
        ("flash_attention_2", "varlen"),
        ("te", "bool_4d"),
    ],
)
def test_c08_the_registered_mask_function_decides_the_layout(key, layout):
    assert get_packing_capabilities(key).layout == layout


def test_a_key_of_ones_own_follows_the_mask_function_registered_with_it():
    AttentionInterface.register("my_attention", lambda *args, **kwargs: None)
    AttentionMaskInterface.register("my_attention", registered_mask("eager"))
    assert get_packing_capabilities("my_attention").layout == "additive_4d"


@pytest.mark.parametrize("key", ["unknown_impl", "magi", "someone/unknown-kernel"])
def test_an_unknown_key_is_an_error_that_lists_the_known_ones(key):
    with pytest.raises(ContractError, match=r"eager.*neat_varlen.*sdpa"):
        get_packing_capabilities(key, model_with(key=key))


def test_an_attention_key_without_a_mask_function_is_refused():
    AttentionInterface.register("maskless", lambda *args, **kwargs: None)
    with pytest.raises(ContractError, match="no mask at all"):
        get_packing_capabilities("maskless")


def test_a_mask_function_of_an_unknown_form_is_refused():
    AttentionMaskInterface.register("odd_masks", lambda *args, **kwargs: None)
    with pytest.raises(ContractError, match="not known"):
        get_packing_capabilities("odd_masks")


@pytest.mark.parametrize("key", ["paged|flash_attention_2", "paged|sdpa", "paged|eager"])
def test_c51_paged_attention_is_refused_for_training(key):
    with pytest.raises(ContractError, match="paged cache"):
        get_packing_capabilities(key)


def test_a_custom_backend_may_have_any_name_if_the_model_itself_carries_it():
    model = model_with(backend="magi")
    assert model_capabilities(model).packed_mask_type == "block_causal"
    dispatched = model_with(backend="magi", key="magi", _uses_hf_attention=True)
    with pytest.raises(ContractError, match="magi"):
        model_capabilities(dispatched)


def test_backend_sdpa_with_an_inert_flash_key_stays_block_causal():
    model = model_with(backend="sdpa", key="flash_attention_4")
    assert model_capabilities(model).packed_mask_type == "block_causal"


def test_an_encoder_decoder_is_refused_by_name():
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        model_capabilities(T5ForConditionalGeneration(config))


def test_a_users_own_child_called_module_is_no_wrapper():
    class Own(nn.Module):
        packed_mask_type = "document_ids"

        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, input_ids, **kwargs):
            return self.module(input_ids)

    assert get_packing_capabilities("sdpa", Own()).packed_mask_type == "document_ids"


def test_nested_wrappers_are_looked_through():
    model = tiny_llama("eager")
    for wrapped in (
        torch.compile(model, backend="eager"),
        nn.DataParallel(torch.compile(model, backend="eager")),
        torch.compile(nn.DataParallel(model), backend="eager"),
    ):
        assert model_capabilities(wrapped).layout == "additive_4d"


# Validation: the forward must be able to take the boundaries.


def forward_with(*names, anything=False):
    parameters = ", ".join(["self", "input_ids=None", *(f"{n}=None" for n in names)])
    namespace = {}
    tail = ", **kwargs" if anything else ""
    exec(f"def forward({parameters}{tail}):\n    return input_ids", namespace)
    return namespace["forward"]


@pytest.mark.parametrize("key", ["sdpa", "eager", "te", "fa4"])
def test_other_implementations_need_no_validation(key):
    validate_flash_packing_support(key, model_with(forward=forward_with()))


@pytest.mark.parametrize("key", [*FLASH, "neat_varlen"])
@pytest.mark.parametrize(
    "forward",
    [
        forward_with(anything=True),
        forward_with("_packed_seq_ids"),
        forward_with(*VARLEN_KEYS),
    ],
)
def test_a_forward_that_can_take_boundaries_passes(key, forward):
    validate_flash_packing_support(key, model_with(forward=forward))
    validate_flash_packing_support(key, nn.DataParallel(model_with(forward=forward)))
    validate_flash_packing_support(key)


@pytest.mark.parametrize("key", [*FLASH, "neat_varlen"])
@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a_blind_or_partial_forward_is_refused_with_what_it_lacks(key, known):
    model = model_with(forward=forward_with(*VARLEN_KEYS[:known]))
    for built in (
        model,
        nn.DataParallel(model),
        torch.compile(model, backend="eager"),
    ):
        with pytest.raises(UnsupportedModelError, match=VARLEN_KEYS[-1]) as caught:
            validate_flash_packing_support(key, built)
        assert isinstance(caught.value, RuntimeError)
        assert "Custom" in str(caught.value)


def test_a_forward_that_cannot_be_inspected_is_refused():
    class Opaque(nn.Module):
        forward = min

    class NotEvenAForward(nn.Module):
        forward = None

    for model in (Opaque(), NotEvenAForward()):
        with pytest.raises(UnsupportedModelError, match="cannot be read"):
            validate_flash_packing_support("flash_attention_2", model)


def test_a_transformers_without_the_kwargs_is_refused_with_the_missing_names(monkeypatch):
    legacy = types.SimpleNamespace(__annotations__={"cu_seq_lens_q": object})
    monkeypatch.setattr(module_under_test, "FlashAttentionKwargs", legacy)
    with pytest.raises(UnsupportedModelError, match="cu_seq_lens_k"):
        configure_packing("flash_attention_2")
    configure_packing("sdpa")


# Configuration: one hook at most, the right one, once.


@pytest.mark.parametrize(
    ("key", "declared", "hook"),
    [
        ("fa4", {"_uses_native_fa4": True}, flatten_packed_metadata_at_model_entry),
        ("sdpa", {}, guard_dense_mask_at_model_entry),
        ("te", {}, guard_dense_mask_at_model_entry),
        (
            "te",
            {"packed_mask_type": "document_ids"},
            strip_unused_packed_metadata_at_model_entry,
        ),
        ("flash_attention_2", {}, rebuild_varlen_kwargs_at_model_entry),
        ("neat_varlen", {}, rebuild_varlen_kwargs_at_model_entry),
        ("sdpa", {"requires_packed_sequence_metadata": True}, None),
    ],
)
def test_configuring_twice_leaves_exactly_one_hook(key, declared, hook):
    model = model_with(**declared)
    first = configure_packing(key, model)
    handle = entry_hook(model)
    assert configure_packing(key, nn.DataParallel(model)) == first
    assert entry_hook(model) is handle
    assert (handle and handle.hook) is hook
    assert len(model._forward_pre_hooks) == (hook is not None)


def test_reconfiguring_replaces_a_hook_that_would_take_needed_boundaries_away():
    model = model_with(_uses_native_fa4=True)
    configure_packing("sdpa", model)
    configure_packing("fa4", model)
    assert entry_hook(model).hook is flatten_packed_metadata_at_model_entry
    assert len(model._forward_pre_hooks) == 1
    recurrent = model_with()
    configure_packing("sdpa", recurrent)
    recurrent.requires_packed_sequence_metadata = True
    configure_packing("sdpa", recurrent)
    assert len(recurrent._forward_pre_hooks) == 0


def test_configuring_flash_needs_no_model():
    assert configure_packing("flash_attention_2").packed_mask_type == "flash_varlen"


def test_configuring_does_not_change_the_model_where_it_fails():
    model = model_with(forward=forward_with())
    with pytest.raises(UnsupportedModelError):
        configure_packing("flash_attention_2", model)
    assert not model._forward_pre_hooks


def test_stages_combine_what_they_need():
    recurrent = model_with(backend="te", requires_packed_sequence_metadata=True)
    plain = model_with(backend="te")
    capabilities = configure_packing_for_models([plain, recurrent])
    assert capabilities.packed_mask_type == "block_causal"
    assert capabilities.requires_packed_sequence_metadata is True
    assert entry_hook(plain).hook is guard_dense_mask_at_model_entry
    assert entry_hook(recurrent) is None


def test_native_fa4_of_any_stage_is_kept():
    native = model_with(backend="fa4", _uses_native_fa4=True)
    own = model_with(backend="sdpa", packed_mask_type="document_ids")
    capabilities = configure_packing_for_models([own, native])
    assert capabilities.uses_native_fa4 is True
    assert capabilities.packed_mask_type == "document_ids"


def test_the_same_model_twice_is_one_model():
    model = model_with(backend="te")
    assert configure_packing_for_models([model, model]).packed_mask_type == "block_causal"
    assert len(model._forward_pre_hooks) == 1


def test_no_stage_and_stages_that_disagree_are_refused():
    with pytest.raises(ContractError, match="No model"):
        configure_packing_for_models([])
    stages = [model_with(key="flash_attention_2"), model_with(key="sdpa")]
    with pytest.raises(ContractError, match=r"stage 0.*flash_varlen.*stage 1.*block_causal"):
        configure_packing_for_models(stages)
    # Both are block-causal, but one adds its mask and the other does not.
    with pytest.raises(ContractError, match=r"bool_4d.*additive_4d"):
        configure_packing_for_models([model_with(key="sdpa"), model_with(key="eager")])


@pytest.mark.parametrize(
    ("section", "result"),
    [
        ({"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ({}, "sdpa"),
        ({"attn_implementation": None}, "sdpa"),
        ({"backend": SimpleNamespace(attn="te"), "attn_implementation": "eager"}, "te"),
        ({"backend": SimpleNamespace(attn=None), "attn_implementation": "eager"}, "eager"),
        (None, "sdpa"),
    ],
)
def test_the_older_reading_of_a_recipe_section(section, result):
    class Section(dict):
        __getattr__ = dict.get

    assert get_attn_implementation(None if section is None else Section(section)) == result


def test_a_changed_key_shows_in_the_next_reading():
    model = tiny_llama("sdpa")
    before = model_capabilities(model)
    model.set_attn_implementation("neat_varlen")
    after = model_capabilities(model)
    assert (before.layout, after.layout) == ("bool_4d", "varlen")


def test_two_models_from_one_config_object_share_their_key():
    # Transformers writes the key into the config, so the model built last changes the first one.
    config = tiny_llama().config
    first = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    assert model_capabilities(first).layout == "bool_4d"
    shared = LlamaForCausalLM(first.config)
    shared.set_attn_implementation("eager")
    assert model_capabilities(first).layout == "additive_4d"
    own = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="neat_varlen")
    assert model_capabilities(own).layout == "varlen"
    assert model_capabilities(first).layout == "additive_4d"
