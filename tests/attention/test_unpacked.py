"""Without packing kwargs `neat_varlen` is what `sdpa` is: padding, generation, caches."""

import pytest
import torch
from tiny_models import random_ids, tiny_model


def left_padded():
    ids = torch.cat([random_ids([9], 1), random_ids([9], 2)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = 0
    return ids, mask


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "llama4"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_of_sdpa(name, cache):
    ids, mask = left_padded()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if cache == "static":
        options["cache_implementation"] = "static"
    tokens, steps = [], []
    for key in ("neat_varlen", "sdpa"):
        out = tiny_model(name, key).generate(
            ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
        )
        tokens.append(out.sequences)
        steps.append(torch.stack(out.logits))
    assert torch.equal(*tokens)
    assert torch.equal(*steps)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_generation_with_softcap_or_sinks_gives_the_tokens_of_eager(name):
    ids, mask = left_padded()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours, eager = (
        tiny_model(name, key).generate(ids, attention_mask=mask, **options)
        for key in ("neat_varlen", "eager")
    )
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "bert", "modernbert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_give_the_logits_and_gradients_of_sdpa(name, side):
    ids, mask = left_padded()
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    results = []
    for key in ("neat_varlen", "sdpa"):
        model = tiny_model(name, key)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_a_padded_batch_with_its_own_positions_is_not_taken_for_a_pack():
    ids, mask = left_padded()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours, theirs = (
        tiny_model("llama", key)(ids, attention_mask=mask, position_ids=positions).logits
        for key in ("neat_varlen", "sdpa")
    )
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])
