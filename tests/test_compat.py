"""Contract test: what this package stands on in transformers and torch, and the traps that it closes.

A release that changes one of these breaks this file, and the name of the test says what it was. Each
trap is shown to be still there, so that a fix upstream is noticed and the guard can go.
"""

import inspect
import subprocess
import sys

import pytest
import torch
from exactness import leaking_documents, packed_inputs
from tiny_models import random_ids, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import hf_neat_packing
from hf_neat_packing import _compat
from hf_neat_packing.attention import ATTENTION_KEY, neat_varlen_attention, neat_varlen_mask
from hf_neat_packing.attention.kernels import KERNELS
from hf_neat_packing.errors import ContractError

LENGTHS = [3, 4, 5]


def run_fresh(code):
    """Run code in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_key_and_its_mask_are_registered_together_and_twice_is_once():
    for _ in range(2):
        hf_neat_packing.register()
        assert _compat.registered_attention(ATTENTION_KEY) is neat_varlen_attention
        assert _compat.registered_mask(ATTENTION_KEY) is neat_varlen_mask
    for kernel in KERNELS:
        assert _compat.registered_mask(f"{ATTENTION_KEY}:{kernel}") is neat_varlen_mask


def test_a_key_that_somebody_else_registered_is_not_taken_over():
    code = (
        "from transformers import AttentionInterface\n"
        "AttentionInterface.register('neat_varlen', print)\n"
        "from hf_neat_packing.errors import ContractError\n"
    )
    result = run_fresh(code)
    assert ContractError.__name__ in result.stderr
    assert "already registered" in result.stderr


def test_a_forgotten_import_gives_the_error_that_the_readme_quotes():
    code = (
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        " num_attention_heads=1, num_key_value_heads=1)\n"
        "AutoModelForCausalLM.from_config(config, attn_implementation='neat_varlen')\n"
    )
    missing = run_fresh(code)
    assert (
        'ValueError: Specified `attn_implementation="neat_varlen"` is not supported.'
        in missing.stderr
    )
    assert run_fresh("import hf_neat_packing\n" + code).returncode == 0


def test_importing_the_package_loads_no_optional_package():
    optional = ("datasets", "accelerate", "kernels", "flash_attn", "matplotlib", "trl", "peft")
    probe = f"import sys; print([m for m in {optional} if m in sys.modules])"
    used = "import transformers.modeling_utils, transformers.trainer_callback"
    before = run_fresh(f"{used}; {probe}")
    after = run_fresh(f"{used}, hf_neat_packing; {probe}")
    assert after.returncode == 0, after.stderr
    assert after.stdout == before.stdout
    control = run_fresh(f"import sys; sys.modules['trl'] = sys; {probe}")
    assert "trl" in control.stdout, "the probe sees an import where there is one"


def test_the_kernel_is_chosen_by_the_key_and_written_in_the_config():
    model, ids = tiny_model("llama", "neat_varlen:explicit"), random_ids(LENGTHS)
    assert _compat.attention_key(model.config) == "neat_varlen:explicit"
    inputs = packed_inputs(LENGTHS)
    assert leaking_documents(lambda x: model(x, **inputs).logits, ids, LENGTHS) == []
    with pytest.raises(ValueError, match="CUDA"):
        tiny_model("llama", "neat_varlen:fa")(ids, **inputs)


def test_the_key_is_not_saved_and_has_to_be_given_at_every_load(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    forgotten = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert _compat.attention_key(forgotten.config) == "sdpa"
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="neat_varlen")
    ids, inputs = random_ids(LENGTHS), packed_inputs(LENGTHS)
    assert torch.equal(again(ids, **inputs).logits, model(ids, **inputs).logits)


def _torch_version():
    return tuple(map(int, torch.__version__.split(".")[:2]))


def test_names_have_the_signatures_that_are_used():
    assert {"mask_function", "attention_mask", "q_offset", "kv_offset", "device"} <= set(
        inspect.signature(_compat.sdpa_mask).parameters
    )
    assert {"dropout", "scaling", "is_causal"} <= set(
        inspect.signature(_compat.sdpa_attention_forward).parameters
    )
    assert set(_compat.FlashAttentionKwargs.__annotations__) >= {
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
    }  # fmt: skip
    varlen = _compat.torch_varlen_attention()
    if varlen is not None:
        names = set(inspect.signature(varlen).parameters)
        assert {"query", "key", "value", "scale", "window_size"} <= names
        assert ("enable_gqa" in names) == _compat.torch_varlen_groups_heads()
    assert (varlen is not None) == (_torch_version() >= (2, 11))


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (causal_mask_function, (None, 0, None)),
        (bidirectional_mask_function, (None, None, None)),
        (sliding_window_causal_mask_function(4), (3, 0, None)),
        (sliding_window_bidirectional_mask_function(4), (4, 4, None)),
        (chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)), (None, 0, 4)),
    ],
)
def test_mask_functions_are_read_as_they_evaluate(function, pattern):
    read = _compat.mask_pattern(function)
    assert read[:3] == pattern
    index = torch.arange(12)
    zero = torch.zeros(1, dtype=torch.int64)
    allowed = function(zero[:, None], zero[:, None], index[:, None], index[None, :]).expand(12, 12)
    distance = index[None, :] - index[:, None]
    expected = torch.ones(12, 12, dtype=torch.bool)
    if read.left is not None:
        expected &= distance >= -read.left
    if read.right is not None:
        expected &= distance <= read.right
    if read.chunk is not None:
        expected &= index[None, :] // read.chunk == index[:, None] // read.chunk
    assert torch.equal(allowed, expected)


def test_a_packed_mask_function_gives_its_documents():
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    read = _compat.mask_pattern(
        and_masks(causal_mask_function, packed_sequence_mask_function(documents))
    )
    assert read.document_map is documents


@pytest.mark.parametrize(
    "function",
    [
        or_masks(causal_mask_function, bidirectional_mask_function),
        lambda batch, head, query, key: key <= query,
        and_masks(causal_mask_function, lambda batch, head, query, key: key > 1),
    ],
)
def test_other_mask_functions_are_not_guessed(function):
    assert _compat.mask_pattern(function) is None


def trap(name, key, **inputs):
    """Documents that leak into one another under a key of transformers."""
    model, ids = tiny_model(name, key), random_ids(LENGTHS)
    return leaking_documents(lambda x: model(x, **inputs).logits, ids, LENGTHS)


def test_trap_1_an_open_cache_switches_packed_detection_off():
    positions = packed_inputs(LENGTHS)["position_ids"]
    assert trap("llama", "sdpa", position_ids=positions, use_cache=False) == []
    assert trap("llama", "sdpa", position_ids=positions) != []
    assert trap("llama", "neat_varlen", position_ids=positions) == []


def test_trap_2_an_indexed_mask_loses_its_numbers():
    ids = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
    assert trap("llama", "sdpa", attention_mask=ids) != []


def test_trap_3_a_key_without_a_mask_entry_gets_no_mask():
    _compat.register_attention("without_mask_for_this_test", _compat.sdpa_attention_forward)
    config = LlamaConfig(hidden_size=8, num_attention_heads=1)
    config._attn_implementation = "without_mask_for_this_test"
    padding = torch.tensor([[0, 1, 1]])
    cache = (
        "cache"
        if "cache" in inspect.signature(create_causal_mask).parameters
        else "past_key_values"
    )
    arguments = {"attention_mask": padding, cache: None, "position_ids": None}
    embeds = torch.zeros(1, 3, 8)
    assert create_causal_mask(config, embeds, **arguments) is None
    config._attn_implementation = "neat_varlen"
    assert create_causal_mask(config, embeds, **arguments) is not None


def test_trap_4_a_boolean_mask_is_added_under_eager():
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    positions = torch.arange(12)[None]
    model, ids = tiny_model("llama", "eager"), random_ids([12])
    other = ids.clone()
    other[0, -1] = 3 + (other[0, -1] - 2) % 90
    with torch.no_grad():
        first, second = (
            model(x, attention_mask=mask, position_ids=positions).logits for x in (ids, other)
        )
    assert not torch.equal(first[:, :-1], second[:, :-1]), "even the future is seen"


def test_trap_5_one_4d_mask_switches_windows_off():
    ids = random_ids([12])
    model = tiny_model("gemma3", "sdpa")
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, model(ids, attention_mask=mask).logits)


def test_trap_6_varlen_kwargs_vanish_under_sdpa():
    inputs = packed_inputs(LENGTHS)
    assert trap("llama", "sdpa", **inputs) != []
    assert trap("llama", "neat_varlen", **inputs) == []


def test_the_environment_names_what_a_number_belongs_to():
    found = _compat.environment()
    assert found["torch"] == torch.__version__
    assert set(found) == {"python", "torch", "transformers", "device"}
