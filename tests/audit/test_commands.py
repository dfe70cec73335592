import json

import pytest
import typer
from typer.testing import CliRunner

from hf_neat_packing.audit import audit_model
from hf_neat_packing.audit.commands import audit_command, card_command
from hf_neat_packing.audit.loading import load_model
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.audit.zoo_run import audit_type
from hf_neat_packing.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def app():
    app = typer.Typer()
    app.command("audit")(audit_command)
    app.command("card")(card_command)
    return app


def run(app, *arguments):
    return CliRunner().invoke(app, list(arguments))


def test_an_exact_type_exits_with_zero_and_shows_its_numbers(app):
    result = run(app, "audit", "llama")
    assert result.exit_code == 0
    assert "LlamaForCausalLM under neat_varlen: exact" in result.output
    assert "control: outputs" in result.output


def test_a_failing_audit_exits_with_one_and_names_the_place(app):
    result = run(app, "audit", "rwkv", "--no-hooks", "--attn", "eager")
    assert result.exit_code == 1
    assert "first difference: rwkv.blocks.0.attention" in result.output


def test_json_holds_the_verdict_and_the_environment(app):
    result = run(app, "audit", "llama", "--attn", "sdpa", "--json")
    report = json.loads(result.output)
    assert report["verdict"] == "exact"
    assert report["attention"] == "sdpa"
    assert {"torch", "transformers", "python"} <= set(report["environment"])


def test_a_folder_is_loaded(app, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    result = run(app, "audit", str(tmp_path))
    assert result.exit_code == 0
    assert "Qwen3ForCausalLM" in result.output


def test_a_refusal_exits_with_one_and_says_why(app):
    result = run(app, "audit", "gpt_oss", "--attn", "sdpa")
    assert result.exit_code == 1
    assert "refused" in result.output
    assert "GptOssForCausalLM" in result.output


def test_nothing_to_audit_is_a_usage_error(app):
    assert run(app, "audit").exit_code == 2


def test_cards_are_written_and_checked(app, tmp_path):
    results, pages = tmp_path / "zoo.jsonl", tmp_path / "cards"
    results.write_text(json.dumps(audit_type("llama", ["sdpa"])) + "\n")
    options = ("--results", str(results), "--directory", str(pages))
    assert run(app, "card", "--check", *options).exit_code == 1
    assert run(app, "card", *options).exit_code == 0
    assert run(app, "card", "--check", *options).exit_code == 0
    (pages / "llama.md").write_text("stale")
    result = run(app, "card", "--check", *options)
    assert result.exit_code == 1
    assert "llama.md" in result.output
    assert run(app, "card", "--results", str(tmp_path / "none"), *options[2:]).exit_code == 2


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("falcon", "attn_implementation='eager' or attn_implementation='sdpa'"),
        ("gpt_neo", "attn_implementation='eager'"),
        ("git", "attn_implementation='eager'"),
    ],
)
def test_a_class_with_a_table_of_attentions_is_named_with_the_keys_it_has(
    model_type, words, tmp_path
):
    # Without a word of ours, loading it is a bare KeyError.
    with pytest.raises(UnsupportedModelError, match=r"table of its own") as caught:
        tiny_model(model_type, attn_implementation="neat_varlen")
    assert words in str(caught.value)
    model = tiny_model(model_type, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=type(model).__name__) as caught:
        load_model(str(tmp_path), "neat_varlen")
    assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    # The remedy holds.
    assert audit_model(load_model(str(tmp_path), "eager"), gradients=False).verdict == "exact"
