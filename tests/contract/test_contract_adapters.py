"""PEFT models: adapters are looked through, methods that put tokens into rows are refused."""

import pytest
import torch
from contract_exactness import tiny_llama
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from hf_neat_packing.capabilities import configure_packing, model_capabilities
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.errors import UnsupportedModelError

IDS = torch.arange(12).reshape(2, 6)
E1 = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])


def test_the_dry_run_sees_through_wrappers():
    model = tiny_llama("neat_varlen")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    proof = prove_isolation(torch.nn.DataParallel(adapted), DataCollatorForNeatPacking(adapted))
    assert len(proof.layers) == 2


def test_prompt_learning_adapters_are_refused_and_lora_is_looked_through():
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny_llama("neat_varlen"), lora)
    assert model_capabilities(adapted).layout == "varlen"
    prompts = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        model_capabilities(get_peft_model(tiny_llama("sdpa"), prompts))


def test_hooks_fire_inside_adapted_models():
    base = tiny_llama("neat_varlen")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    configure_packing("neat_varlen", adapted)
    seen = {}
    base.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    adapted(input_ids=IDS, _packed_seq_ids=E1)
    assert seen["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]
