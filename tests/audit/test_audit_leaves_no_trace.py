import torch
from broken_models import llama

from hf_neat_packing.audit import audit_model


def test_modes_random_state_gradients_and_config_stay_as_they_were():
    model = llama()
    model.train()
    model.model.layers[0].eval()
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    audit_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.layers[0].training
    assert model.lm_head.weight.grad is kept
    assert model.model.norm.weight.grad is None
    assert model.config.use_cache is True
    assert model.config._attn_implementation == "neat_varlen"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_running_statistics_of_a_batch_norm_are_given_back():
    model = llama()
    model.extra = torch.nn.BatchNorm1d(4)

    def run_extra(module, args, output):
        model.extra(torch.arange(20.0).view(5, 4))

    model.register_forward_hook(run_extra)
    model.train()
    audit_model(model)
    assert int(model.extra.num_batches_tracked) == 0
