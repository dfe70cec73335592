"""Hub kernels, loaded for real by the `kernels` package from a local folder.

Two tiny universal kernels: one varlen function in plain torch, which drives the true flash path of
transformers on a CPU, and one with an entry point of its own, which takes a mask.
"""

import json
import sys

import pytest
import torch
from contract_exactness import (
    assert_as_exact_as_alone,
    assert_same_gradients,
    documents,
    double,
    gradients,
    run_alone,
    summed_loss,
    tiny_llama,
)

from hf_neat_packing._compat import flash_attention_mask, registered_mask, sdpa_mask
from hf_neat_packing.callback import require_same_layout
from hf_neat_packing.capabilities import (
    configure_packing_for_models,
    get_model_attn_implementation,
    get_packing_capabilities,
    model_capabilities,
)
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.errors import ContractError, UnsupportedModelError

VARLEN = """
import torch

calls = []


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
):
    calls.append((cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    parts = []
    for start, stop in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]):
        x = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *x, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    x = [t.transpose(1, 2) for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *x, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def flash_attn_with_kvcache(*args, **kwargs):
    raise RuntimeError("no cache here")
"""

OWN_ENTRY = """
import torch

masks = []
supports_flash_attn = True


def flash_attn_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    masks.append(attention_mask)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None,
        scale=scaling, enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None
"""

# It takes a mask and does not look at it.
BLIND = """
import torch

supports_flash_attn = True


def flash_attn_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
"""

VARLEN_IDS = [
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn2@v2",
    "kernels-community/flash-attn3:flash_attention",
    "kernels-community/vllm-flash-attn3",
    "kernels-community/flash-attn2@v1:fn",
    "someone/tiny-varlen@main",
]
OWN_IDS = ["someone/own-entry", "someone/own-entry@v3:anything"]


@pytest.fixture(scope="module", autouse=True)
def local_kernels(tmp_path_factory):
    """Let the `kernels` package find the two kernels in folders instead of on the hub."""
    places = {}
    for name, source in (("varlen", VARLEN), ("own", OWN_ENTRY), ("blind", BLIND)):
        variant = tmp_path_factory.mktemp(name) / "build" / "torch-universal"
        variant.mkdir(parents=True)
        metadata = {
            "id": f"_tiny_{name}",
            "name": f"tiny-{name}",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata))
        (variant / "__init__.py").write_text(source)
        places[name] = variant.parent.parent
    repositories = {key.partition(":")[0].partition("@")[0] for key in VARLEN_IDS}
    entries = [f"{repository}={places['varlen']}" for repository in sorted(repositories)]
    entries += [f"someone/own-entry={places['own']}", f"someone/blind={places['blind']}"]
    import kernels
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", ":".join(entries))
        # Transformers takes a narrow range of versions of `kernels`, all of which load local folders alike.
        patch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        patch.setattr(modeling_utils, "is_kernels_available", lambda: True)
        patch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
        yield


def kernel_module(name):
    # The package imports a kernel under the id of its metadata.
    return sys.modules[f"_tiny_{name}"]


def load(key):
    model = tiny_llama("sdpa")
    model.set_attn_implementation(key, allow_all_kernels=True)
    assert model.config._attn_implementation == key
    return model


@pytest.mark.parametrize("key", VARLEN_IDS)
def test_c51_a_varlen_kernel_reads_offsets_under_whatever_id_it_was_loaded(key):
    model = load(key)
    assert registered_mask(key) is flash_attention_mask
    capabilities = model_capabilities(model)
    assert capabilities.packed_mask_type == "flash_varlen"
    assert capabilities.layout == "varlen"
    assert "flash_attention_mask" in str(capabilities)


@pytest.mark.parametrize("key", OWN_IDS)
def test_a_kernel_with_its_own_entry_point_reads_a_boolean_mask(key):
    model = load(key)
    assert registered_mask(key) is sdpa_mask
    assert get_model_attn_implementation(model) == key
    assert model_capabilities(model).layout == "bool_4d"


def test_an_id_that_was_never_loaded_is_refused():
    with pytest.raises(ContractError, match="no kernel was loaded"):
        get_packing_capabilities("someone/never-loaded@v1")


def test_asking_for_flash_where_only_a_kernel_provides_it_is_still_flash():
    model = tiny_llama("flash_attention_2")
    assert model.config._attn_implementation == "kernels-community/flash-attn2"
    assert get_model_attn_implementation(model) == "flash_attention_2"
    assert model_capabilities(model).layout == "varlen"


def test_two_stages_with_one_kernel_under_two_revisions_agree():
    stages = [load("kernels-community/flash-attn2@v2"), load("someone/tiny-varlen@main")]
    assert configure_packing_for_models(stages).layout == "varlen"


def pack_and_run(model, docs, **options):
    collator = DataCollatorForNeatPacking(model, **options)
    batch = collator([{"input_ids": document.tolist()} for document in docs])
    out = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False)
    return batch, out.logits


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 16}])
def test_the_true_flash_path_is_exact_and_gets_the_collators_offsets(options):
    docs = documents(3, 7, 1, 5)
    model = load("kernels-community/flash-attn2")
    calls = kernel_module("varlen").calls
    calls.clear()
    batch, logits = pack_and_run(model, docs, **options)

    assert len(calls) == model.config.num_hidden_layers
    for cu_q, cu_k, longest_q, longest_k in calls:
        assert cu_q is batch["cu_seq_lens_q"]
        assert cu_k is batch["cu_seq_lens_k"]
        assert (longest_q, longest_k) == (batch["max_length_q"], batch["max_length_k"])
        assert type(longest_q) is int

    packed_gradients = gradients(model, summed_loss(logits, batch["labels"]))
    reference = tiny_llama("sdpa")
    alone, alone_gradients = run_alone(reference, docs)
    truth, true_gradients = run_alone(double(reference), docs)
    parts = logits[0, : sum(map(len, docs))].split([len(document) for document in docs])
    for part, one, true in zip(parts, alone, truth, strict=True):
        assert_as_exact_as_alone(part, one, true, "logits")
    assert_same_gradients(packed_gradients, alone_gradients, true_gradients)


def test_the_control_without_boundaries_is_inexact():
    docs = documents(3, 7, 1, 5)
    model = load("kernels-community/flash-attn2")
    row = torch.cat(docs)[None]
    logits = model(input_ids=row, use_cache=False).logits
    reference = tiny_llama("sdpa")
    alone, truth = run_alone(reference, docs)[0], run_alone(double(reference), docs)[0]
    with pytest.raises(AssertionError, match="off by"):
        assert_as_exact_as_alone(logits[0, -5:], alone[-1], truth[-1])


def test_a_kernel_with_its_own_entry_point_is_exact_with_the_collators_mask():
    docs = documents(3, 7, 1, 5)
    model = load("someone/own-entry")
    kernel_module("own").masks.clear()
    batch, logits = pack_and_run(model, docs)
    assert all(mask is batch["attention_mask"] for mask in kernel_module("own").masks)
    assert len(kernel_module("own").masks) == model.config.num_hidden_layers
    reference = tiny_llama("sdpa")
    alone, truth = run_alone(reference, docs)[0], run_alone(double(reference), docs)[0]
    for part, one, true in zip(logits[0].split([len(d) for d in docs]), alone, truth, strict=True):
        assert_as_exact_as_alone(part, one, true, "logits")


def test_a_mask_left_beside_the_offsets_would_win_so_the_entry_hook_takes_it_away():
    docs = documents(4, 6)
    model = load("kernels-community/flash-attn2")
    batch = DataCollatorForNeatPacking(model, pad_to_multiple_of=16)(
        [{"input_ids": document.tolist()} for document in docs]
    )
    batch["attention_mask"] = (batch["_packed_seq_ids"] != 0).long()
    calls = kernel_module("varlen").calls
    calls.clear()
    model(**batch, use_cache=False)
    assert calls[-1][0].tolist() == [0, 10], "without the hook transformers follows the mask"
    configure_packing_for_models([model])
    calls.clear()
    model(**batch, use_cache=False)
    assert calls[-1][0].tolist() == [0, 4, 10, 16]


@pytest.mark.parametrize("key", ["kernels-community/flash-attn2@v2", "someone/own-entry"])
def test_the_dry_run_proves_kernels_that_read_their_boundaries(key):
    model = load(key)
    assert prove_isolation(model, DataCollatorForNeatPacking(model)).change_in_second == 0


def test_the_dry_run_catches_a_kernel_that_takes_a_mask_and_does_not_read_it():
    model = load("someone/blind")
    assert model_capabilities(model).layout == "bool_4d"
    with pytest.raises(UnsupportedModelError, match="not used"):
        prove_isolation(model, DataCollatorForNeatPacking(model))


def test_a_kernel_set_after_the_collator_was_built_is_noticed():
    model = tiny_llama("sdpa")
    collator = DataCollatorForNeatPacking(model)
    model.set_attn_implementation("kernels-community/flash-attn2@v2")
    with pytest.raises(ContractError, match=r"(?s)bool_4d.*flash_attention_mask"):
        require_same_layout(model, collator)
