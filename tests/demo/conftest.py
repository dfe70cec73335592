"""Caches in a temporary folder, a few texts, and a tiny model: nothing outside is touched."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_neat_packing  # noqa: F401  # registers neat_varlen
from hf_neat_packing.demo.tokenizer import demo_tokenizer

WORDS = ["def", "return", "self", "import", "for", "in", "if", "else", "print", "yield", "class"]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(folder))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (80,), generator=generator).tolist()
    picks = torch.randint(0, len(WORDS), (sum(lengths),), generator=generator).tolist()
    found = []
    for length in lengths:
        found.append(" ".join(WORDS[pick] for pick in picks[:length]))
        picks = picks[length:]
    return found


@pytest.fixture
def jsonl(tmp_path, texts) -> Path:
    path = tmp_path / "texts.jsonl"
    rows = ({"text": text, "number": number} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer(texts, tmp_path):
    return demo_tokenizer(texts, vocab_size=300, cache=tmp_path / "tokenizers")[0]


@pytest.fixture
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        attn_implementation="neat_varlen",
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def model_folder(tiny_llama, tokenizer, tmp_path) -> Path:
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def pack() -> dict[str, list[list[int]]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 9, 3, 2, 12, 4, 7, 6, 8)
    return {
        "input_ids": [
            torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths
        ]
    }
