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


def test_rotary_tables_that_grew_and_attributes_that_were_set_are_given_back():
    class Grows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.longest = 0
            self.last = None
            self.register_buffer("table", torch.zeros(2))

        def forward(self, hidden):
            self.longest = max(self.longest, hidden.shape[1])
            self.last = hidden
            self.table = torch.ones(self.longest)
            return hidden

    model = llama()
    model.model.norm = torch.nn.Sequential(model.model.norm, Grows())
    grows, table = model.model.norm[1], model.model.norm[1].table
    audit_model(model)
    assert (grows.longest, grows.last) == (0, None)
    assert grows.table is table
    assert table.tolist() == [0.0, 0.0]
