"""A small Llama with random weights, made from its config."""

from typing import Any


def small_llama(*, vocab_size: int, max_length: int, end_of_text: int | None, seed: int = 0) -> Any:
    """Build a Llama of about 5 million parameters (at 4,096 words) that attends by `neat_varlen`.

    Args:
        vocab_size: Entries of the tokenizer's vocabulary.
        max_length: The longest document, in tokens.
        end_of_text: Token id that ends a document, if there is one.
        seed: Of the random weights.

    Returns:
        A `LlamaForCausalLM` in float32.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        attn_implementation="neat_varlen",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
