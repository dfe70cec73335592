"""Other ways to the same end: native boundaries, wrappers, half precision, boundaries that a model drops."""

import copy

import pytest
import torch
from isolation.mixing_models import HIDDEN, Recurrent, documents, tiny, values
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.contract import PackingCapabilities
from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.hooks.running import read_layout
from hf_neat_packing.isolation import isolate, isolation_of

LENGTHS = [7, 1, 12, 5, 9]


def batch_for(model, docs, **options):
    batch = DataCollatorForNeatPacking(model, **options)(
        [{"input_ids": ids.tolist()} for ids in docs]
    )
    batch.pop("labels", None)
    return batch


def alone(model, docs):
    with torch.no_grad():
        return torch.cat([values(model(input_ids=ids[None], use_cache=False))[0] for ids in docs])


def error(model, docs, truth):
    with torch.no_grad():
        packed = values(model(**batch_for(model, docs)))[0]
    return float((packed - truth).abs().max() / truth.abs().max())


class NativeRecurrent(nn.Module):
    """A running sum that restarts where the offsets say so, as a kernel with `cu_seqlens` does."""

    def __init__(self, honoured):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.honoured = honoured

    def forward(self, hidden, cu_seq_lens_q=None, **kwargs):
        mixed = self.mix(hidden)
        if cu_seq_lens_q is None or not self.honoured:
            return mixed.cumsum(1)
        flat = mixed.flatten(0, 1)
        parts = flat.split(cu_seq_lens_q.diff().tolist())
        return torch.cat([part.cumsum(0) for part in parts]).reshape(hidden.shape)


class PassesKeywords(nn.Module):
    packed_mask_type = "flash_varlen"

    def __init__(self, layer):
        super().__init__()
        self.model = tiny(layer)

    def forward(self, input_ids, **kwargs):
        kwargs.pop("position_ids", None)
        return self.model.head(self.model.layer(self.model.tokens(input_ids), **kwargs))


@pytest.mark.parametrize("honoured", [True, False])
def test_a_kernel_gets_the_offsets_where_it_was_seen_to_honour_them(honoured):
    model = PassesKeywords(NativeRecurrent(honoured)).eval()
    docs = documents(LENGTHS)
    report = isolate(model)
    assert [part.module_class for part in report.applied] == (
        [] if honoured else ["NativeRecurrent"]
    )
    collate = DataCollatorForNeatPacking(contract=PackingCapabilities("flash_varlen"))
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels")
    with torch.no_grad():
        truth = torch.cat([model(input_ids=ids[None])[0] for ids in docs])
        torch.testing.assert_close(model(**batch)[0], truth)


class DropsKeywords(LlamaForCausalLM):
    """A model of one's own that forgets to hand its keyword arguments on."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden)


def test_boundaries_that_a_model_drops_on_the_way_are_handed_to_its_attention():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    config._attn_implementation = "neat_varlen"
    model = DropsKeywords(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    docs = documents(LENGTHS)
    truth = alone(model, docs)
    assert error(model, docs, truth) > 1e-2
    report = isolate(model)
    repairs = {part.repair for part in report.applied}
    assert any("handed to attention" in repair for repair in repairs), report
    assert not report.unpacked
    assert error(model, docs, truth) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model_type", ["llama", "mamba2", "qwen3_next"])
def test_other_dtypes_are_isolated_by_the_same_repairs(model_type, dtype):
    model = tiny_model(model_type, attn_implementation="neat_varlen", dtype=dtype)
    docs = documents(LENGTHS)
    report = isolate(model)
    in_single = isolate(tiny_model(model_type, attn_implementation="neat_varlen"))
    assert report.applied == in_single.applied
    with torch.no_grad():
        one = values(model(**batch_for(model, docs)))
        other = values(model(**batch_for(model, [(docs[0] + 9) % 60, *docs[1:]])))
    moved = (one[:, 7:] - other[:, 7:]).abs().max() / one.abs().max()
    limit = 0.0 if model_type != "qwen3_next" else 20 * torch.finfo(dtype).eps
    assert float(moved) <= limit
    assert not torch.equal(one[:, :7], other[:, :7])


class Wrapper(nn.Module):
    """Hands everything on, as DDP, FSDP and compiled modules do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_a_wrapped_model_is_isolated_through_its_wrappers():
    model = tiny_model("lfm2", attn_implementation="neat_varlen")
    docs = documents(LENGTHS)
    truth = alone(model, docs)
    wrapped = Wrapper(Wrapper(model))
    with isolate(wrapped):
        assert error(wrapped, docs, truth) < 1e-5
        assert error(model, docs, truth) < 1e-5  # called by itself, too
    assert error_of_leak(wrapped, docs, truth) > 1e-2


def error_of_leak(model, docs, truth):
    ids = torch.cat(docs)[None]
    positions = torch.cat([torch.arange(len(d)) for d in docs])[None]
    with torch.no_grad():
        output = values(model(input_ids=ids, position_ids=positions, use_cache=False))[0]
    return float((output - truth).abs().max() / truth.abs().max())


def test_a_batch_of_restarting_positions_alone_is_isolated_too():
    model = tiny_model("lfm2", attn_implementation="neat_varlen")
    docs = documents(LENGTHS)
    truth = alone(model, docs)
    assert error_of_leak(model, docs, truth) > 1e-2
    with isolate(model):
        assert error_of_leak(model, docs, truth) < 1e-5


def test_positions_of_padded_or_cached_batches_are_not_read_as_documents():
    positions = torch.tensor([[1, 1, 0, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert read_layout({"position_ids": positions, "attention_mask": mask}, (1, 5)) is None
    assert read_layout({"position_ids": positions, "past_key_values": object()}, (1, 5)) is None
    assert read_layout({"position_ids": positions}, (1, 5)).lengths == (1, 1, 3)
    assert read_layout({"position_ids": torch.arange(5)[None]}, (1, 5)) is None


def test_a_copy_of_an_isolated_model_is_isolated_by_hooks_of_its_own():
    model = tiny_model("lfm2", attn_implementation="neat_varlen")
    docs = documents(LENGTHS)
    truth = alone(model, docs)
    report = isolate(model)
    copied = copy.deepcopy(model)
    report.remove()
    assert error_of_leak(model, docs, truth) > 1e-2
    assert error(copied, docs, truth) < 1e-5
    isolation_of(copied).remove()
    assert error_of_leak(copied, docs, truth) > 1e-2


@pytest.mark.parametrize("model_type", ["lfm2", "deepseek_v32", "bart"])
def test_a_transformers_model_is_as_it_was_after_removal(model_type):
    model = tiny_model(model_type, attn_implementation="neat_varlen").train()
    state = [dict(vars(module)) for module in model.modules()]
    configs = [vars(module).get("config") for module in model.modules()]
    keys = [config and config.to_dict() for config in configs]
    isolate(model).remove()
    for before, module in zip(state, model.modules(), strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module.training
    after = [vars(module).get("config") for module in model.modules()]
    assert all(one is two for one, two in zip(configs, after, strict=True))
    assert [config and config.to_dict() for config in after] == keys


class HandsEverythingOn(PassesKeywords):
    """Passes its keyword arguments to a layer that knows none of them."""

    def forward(self, input_ids, **kwargs):
        kwargs.pop("position_ids", None)
        return self.model.head(self.model.layer(self.model.tokens(input_ids), **kwargs))


def test_keywords_that_a_layer_does_not_know_are_taken_away_at_the_entry():
    model = HandsEverythingOn(Recurrent()).eval()
    docs = documents(LENGTHS)
    collate = DataCollatorForNeatPacking(contract=PackingCapabilities("flash_varlen"))
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels")
    with pytest.raises(TypeError):
        model(**batch)
    report = isolate(model)
    assert not report.unpacked
    with torch.no_grad():
        truth = torch.cat([model(input_ids=ids[None])[0] for ids in docs])
        torch.testing.assert_close(model(**batch)[0], truth)


@pytest.mark.parametrize("key", ["neat_varlen", "sdpa"])
def test_a_model_that_needs_more_than_tokens_is_refused_by_name(key):
    model = tiny_model("gemma4_assistant", attn_implementation=key)
    with pytest.raises(UnsupportedModelError, match=r"Gemma4Assistant.*shared_kv_states"):
        isolate(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
