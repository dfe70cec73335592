"""The yardstick of the tests here: a packed run may err as much as the documents run alone."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(key, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = LlamaConfig(**(sizes | changes))
    return LlamaForCausalLM._from_config(config, attn_implementation=key)


def documents(*lengths, vocabulary=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]


def summed_loss(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
        labels[:, 1:].reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run_alone(model, docs, *, forward=None):
    """Logits of each document alone, and the gradients of their summed losses."""
    call = forward or (lambda ids: model(input_ids=ids, use_cache=False).logits)
    logits = [call(document[None])[0] for document in docs]
    loss = sum(
        summed_loss(x[None], document[None]) for x, document in zip(logits, docs, strict=True)
    )
    return [x.detach() for x in logits], gradients(model, loss)


def double(model):
    return copy.deepcopy(model).double()


def assert_as_exact_as_alone(packed, alone, truth, what=""):
    """Compare with float64: at most twice the error of the same dtype alone, and a rounding of the largest."""
    packed, alone, truth = (x.detach().double() for x in (packed, alone, truth))
    scale = truth.abs().max()
    bound = 2 * (alone - truth).abs().max() + scale * torch.finfo(torch.float32).eps
    error = (packed - truth).abs().max()
    assert error <= bound, f"{what}: off by {error:.3e}, allowed {bound:.3e}, largest {scale:.3e}"


def assert_same_gradients(packed, alone, truth):
    assert packed.keys() == alone.keys() == truth.keys()
    assert packed
    for name, value in packed.items():
        assert_as_exact_as_alone(value, alone[name], truth[name], name)
