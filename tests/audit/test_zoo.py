import json

import pytest
import torch

from hf_neat_packing.audit import zoo_run
from hf_neat_packing.audit.zoo import ENCODERS, model_types, tiny_model
from hf_neat_packing.errors import UnsupportedModelError


def test_every_causal_type_of_the_auto_mapping_is_listed_and_the_encoders_too():
    types = model_types()
    assert len(types) == len(set(types))
    assert {"llama", "mamba2", "bert", "bert:masked"} <= set(types)
    assert len(types) - len(ENCODERS) >= 100


def test_equal_arguments_give_equal_weights_for_every_attention_and_dtype():
    one = tiny_model("llama").state_dict()
    two = tiny_model("llama", attn_implementation="eager").state_dict()
    wide = tiny_model("llama", dtype=torch.float64).state_dict()
    other = tiny_model("llama", seed=1).state_dict()
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert torch.equal(value.double(), wide[name])
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_building_does_not_move_the_random_state():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    tiny_model("reformer")
    assert torch.equal(torch.get_rng_state(), state)


def test_windows_are_shorter_than_the_documents():
    assert tiny_model("qwen3").config.sliding_window == 4
    assert "sliding_attention" in tiny_model("qwen3").config.layer_types


def test_an_unknown_type_is_refused():
    with pytest.raises(UnsupportedModelError, match="'llamma' is no type"):
        tiny_model("llamma")


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "zoo.jsonl"
    seen = []

    def in_processes(types, attentions, jobs):
        for name in types:
            if len(seen) == 2:
                raise KeyboardInterrupt
            seen.append(name)
            runs = [{"attention": key, "verdict": "exact"} for key in attentions]
            yield {"model_type": name, "versions": zoo_run._versions(), "runs": runs}

    monkeypatch.setattr(zoo_run, "_in_processes", in_processes)
    types = ["mixtral", "llama", "gpt2"]
    with pytest.raises(KeyboardInterrupt):
        zoo_run.run_zoo(path, types=types)
    assert {json.loads(line)["model_type"] for line in path.read_text().splitlines()} == {
        "mixtral",
        "llama",
    }
    seen.clear()
    results = zoo_run.run_zoo(path, types=types)
    assert seen == ["gpt2"]
    assert [result["model_type"] for result in results] == types


def test_results_of_other_versions_are_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "zoo.jsonl"
    old = {"model_type": "llama", "versions": {"torch": "1.0", "transformers": "4.0"}, "runs": []}
    path.write_text(json.dumps(old) + "\n")
    monkeypatch.setattr(
        zoo_run,
        "_in_processes",
        lambda types, attentions, jobs: (
            {"model_type": name, "versions": zoo_run._versions(), "runs": []} for name in types
        ),
    )
    assert zoo_run.run_zoo(path, types=["llama"])[0]["versions"] == zoo_run._versions()


def test_a_type_that_cannot_be_built_is_said_so_and_not_counted_as_refused():
    result = zoo_run.audit_type("gemma3n", ["neat_varlen"])
    verdicts = {run["verdict"] for run in result["runs"]}
    # With timm installed it can be built.
    assert verdicts <= {"cannot build", "exact", "refused"}


def test_a_key_that_a_class_does_not_support_is_refused_with_the_reason():
    result = zoo_run.audit_type("gpt_oss", ["sdpa"])
    assert {run["verdict"] for run in result["runs"]} == {"refused"}
    assert "GptOssForCausalLM does not support" in result["runs"][0]["reason"]
