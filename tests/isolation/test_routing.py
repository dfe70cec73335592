"""Padding has no part in what a router counts: its balance loss is that of the same rows without a tail."""

import copy

import pytest
import torch
from torch import nn

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit.batches import random_documents
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.capabilities import configure_packing_for_models
from hf_neat_packing.dry_run import require_balance_without_padding
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.hooks.routing import leave_padding_out_of_routing, routing_hooks
from hf_neat_packing.isolation import isolate

PADDED = {"pad_to_multiple_of": 64}
ROUTED = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "phimoe",
    "jetmoe",
    "gpt_oss",
    "minimax_m2",
]


def routed(model_type, key="neat_varlen"):
    return tiny_model(model_type, attn_implementation=key)


def run(model, documents=None, **options):
    documents = random_documents(model) if documents is None else documents
    batch = DataCollatorForNeatPacking(model, **options)(documents)
    return model(**batch, use_cache=False, output_router_logits=True)


def in_rows(model):
    """Two rows with tails of different lengths."""
    documents = random_documents(model)
    return {"documents": [documents[:3], documents[3:]], "row_length": 24, "rows": "packs"}


@pytest.mark.parametrize("model_type", ROUTED)
def test_a_padding_tail_does_not_move_the_balance_loss(model_type):
    model = routed(model_type)
    with torch.no_grad():
        bare, counted = run(model), run(model, **PADDED)
        # The control: without hooks the tail trains the router.
        assert abs(float(counted.aux_loss - bare.aux_loss)) > 1e-3
        with leave_padding_out_of_routing(model):
            for options in ({}, PADDED, in_rows(model)):
                output = run(model, **options)
                torch.testing.assert_close(output.aux_loss, bare.aux_loss)
                torch.testing.assert_close(output.loss, bare.loss)
                assert {len(logits) for logits in output.router_logits} <= {36, 72}
        torch.testing.assert_close(run(model, **PADDED).aux_loss, counted.aux_loss)
    assert routing_hooks(model) is None


@pytest.mark.parametrize("key", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_a_mask_per_layer_goes_to_attention_and_not_to_the_balance_loss(model_type, key):
    model, truth = routed(model_type, key), routed(model_type)
    with torch.no_grad():
        bare = run(truth)
        # The control: the loss reads a mask of any form as one of padding.
        with pytest.raises((RuntimeError, AttributeError)):
            run(model)
        configure_packing_for_models([model])
        for options in ({}, PADDED, in_rows(model)):
            output = run(model, **options)
            torch.testing.assert_close(output.aux_loss, bare.aux_loss)
            torch.testing.assert_close(output.loss, bare.loss)


def test_the_gradient_of_the_balance_loss_is_that_of_rows_without_a_tail():
    def gradients(model, **options):
        model.zero_grad()
        run(model, **options).aux_loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = routed("mixtral")
    bare, counted = gradients(model), gradients(model, **PADDED)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(bare, counted, strict=True))
    with leave_padding_out_of_routing(model):
        torch.testing.assert_close(gradients(model, **PADDED), bare, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "minimax_m3_vl_text", "qwen3_next"])
def test_isolate_leaves_padding_out_where_tokens_are_regrouped_too(model_type):
    model = routed(model_type)
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = True
    with isolate(model) as report, torch.no_grad():
        assert any("leaves padding out" in note for note in report.notes)
        bare = run(model)
        for options in (PADDED, in_rows(model)):
            torch.testing.assert_close(run(model, **options).aux_loss, bare.aux_loss)
    assert routing_hooks(model) is None


def test_hooks_of_configure_packing_outlive_those_of_isolate():
    model = routed("mixtral")
    configure_packing_for_models([model])
    hooks = routing_hooks(model)
    with isolate(model), torch.no_grad():
        bare = run(model)
        torch.testing.assert_close(run(model, **PADDED).aux_loss, bare.aux_loss)
    assert routing_hooks(model) is hooks
    with torch.no_grad():
        torch.testing.assert_close(run(model, **PADDED).aux_loss, bare.aux_loss)
    hooks.remove()
    hooks.remove()
    assert routing_hooks(model) is None


def test_hooks_that_came_first_read_what_isolate_regroups():
    model = routed("minimax_m3_vl_text", "sdpa")
    configure_packing_for_models([model])
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = True
    with isolate(model) as report, torch.no_grad():
        assert report.applied or report.unpacked
        bare = run(model)
        for options in (PADDED, in_rows(model)):
            torch.testing.assert_close(run(model, **options).aux_loss, bare.aux_loss)


def test_a_forward_past_the_hooks_of_the_model_leaves_padding_out_too():
    model = routed("mixtral")
    batch = DataCollatorForNeatPacking(model, **PADDED)(random_documents(model))
    with torch.no_grad(), leave_padding_out_of_routing(model):
        bare = run(model)
        output = model.forward(**batch, output_router_logits=True)
        torch.testing.assert_close(output.aux_loss, bare.aux_loss)


def test_a_forward_that_asks_for_no_balance_loss_passes_untouched():
    model = routed("mixtral")
    hooks = leave_padding_out_of_routing(model)
    running = []
    model.model.register_forward_hook(lambda *a: running.append(hooks.is_running()))
    batch = DataCollatorForNeatPacking(model, **PADDED)(random_documents(model))
    with torch.no_grad():
        model(**batch)
        model(**batch, output_router_logits=True)
    assert running == [False, True]
    assert not hooks.is_running()


def test_a_copy_has_hooks_of_its_own():
    model = routed("mixtral")
    hooks = leave_padding_out_of_routing(model)
    copied = copy.deepcopy(model)
    hooks.remove()
    with torch.no_grad():
        bare = run(model)
        assert abs(float(run(model, **PADDED).aux_loss - bare.aux_loss)) > 1e-3
        torch.testing.assert_close(run(copied, **PADDED).aux_loss, bare.aux_loss)
        routing_hooks(copied).remove()
        assert abs(float(run(copied, **PADDED).aux_loss - bare.aux_loss)) > 1e-3


def test_a_batch_of_ones_own_is_left_alone():
    model = routed("mixtral")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for inputs in ({}, {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}):
        with torch.no_grad():
            before = model(input_ids=ids, output_router_logits=True, **inputs)
            with leave_padding_out_of_routing(model):
                after = model(input_ids=ids, output_router_logits=True, **inputs)
        assert torch.equal(before.aux_loss, after.aux_loss)


def test_a_model_without_a_router_gets_no_hooks():
    assert leave_padding_out_of_routing(routed("llama")) is None


def test_training_that_would_count_padding_does_not_begin():
    model = routed("mixtral")
    padded, flat = DataCollatorForNeatPacking(model, **PADDED), DataCollatorForNeatPacking(model)
    require_balance_without_padding(model, padded)  # nobody asks for the loss
    model.config.output_router_logits = True
    require_balance_without_padding(model, flat)
    with pytest.raises(ContractError, match=r"MixtralForCausalLM.*isolate\(model\)"):
        require_balance_without_padding(model, padded)
    with isolate(model):
        require_balance_without_padding(model, padded)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ContractError, match="mask of another form"):
        require_balance_without_padding(model, DataCollatorForNeatPacking(model))
    configure_packing_for_models([model])
    require_balance_without_padding(model, DataCollatorForNeatPacking(model))


class OwnBalance(nn.Module):
    """Takes a balance loss of its own over the whole row, where no hook reaches."""

    def __init__(self, model):
        super().__init__()
        self.inner_model, self.config = model, model.config

    def get_input_embeddings(self):
        return self.inner_model.get_input_embeddings()

    def forward(self, input_ids=None, **kwargs):
        output = self.inner_model(input_ids=input_ids, output_router_logits=False, **kwargs)
        output["aux_loss"] = output.logits.square().mean()
        return output


def test_a_balance_loss_that_no_hook_reaches_is_refused_where_it_is_trained():
    model = OwnBalance(routed("mixtral"))
    with isolate(model) as report:
        assert any("no balance loss of the router is asked for" in note for note in report.notes)
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedModelError, match="padding would train the router"):
        isolate(model)
