"""No tensor of the size of the row squared exists in a training step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking

ROW = 4096


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, backward included."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def largest_in_a_step(config, key, lengths, window=None):
    config._attn_implementation = key
    torch.manual_seed(0)
    cls = MistralForCausalLM if window else LlamaForCausalLM
    model = cls(config)
    collator = DataCollatorForNeatPacking(model)
    documents = [{"input_ids": torch.randint(3, 50, (n,)).tolist()} for n in lengths]
    with LargestTensor() as largest:
        model(**collator(documents), use_cache=False).loss.backward()
    return largest.elements


BASE = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": ROW,
}  # fmt: skip


@pytest.mark.parametrize("lengths", [[500] * 8 + [96], [1500, 7, 1, 1000, 1000, 588]])
def test_neat_varlen_never_makes_a_tensor_of_the_row_squared(lengths):
    assert largest_in_a_step(LlamaConfig(**BASE), "neat_varlen", lengths) < ROW * ROW / 4


def test_a_window_in_one_long_document_is_walked_in_blocks():
    config = MistralConfig(**BASE, sliding_window=128)
    assert largest_in_a_step(config, "neat_varlen", [ROW], window=128) < ROW * ROW / 4


def test_the_same_check_catches_sdpa():
    assert largest_in_a_step(LlamaConfig(**BASE), "sdpa", [500] * 8 + [96]) >= ROW * ROW / 4


def test_c54_a_long_varlen_batch_is_small():
    collator = DataCollatorForNeatPacking()
    batch = collator([{"input_ids": list(range(3, 259))} for _ in range(64)])
    size = sum(v.numel() * v.element_size() for v in batch.values() if isinstance(v, torch.Tensor))
    assert batch["input_ids"].shape == (1, 16384)
    assert size < 1_000_000
