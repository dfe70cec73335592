"""The command as a user meets it: what it shows, and what it says when something is wrong."""

import json

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconConfig, FalconForCausalLM
from typer.testing import CliRunner

from hf_neat_packing.cli import app
from hf_neat_packing.demo.inputs import model_for
from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.planning import PackingReport

MINIMAL = ["--max-length", "48", "--steps", "3", "--learning-rate", "0.01"]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*words: object):
        result = CliRunner().invoke(app, [str(word) for word in words])
        # An exception that is no exit would be a traceback for the user.
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result

    return invoke


def said(result) -> str:
    """Everything that was shown, in one line: messages wrap at the terminal's width."""
    return " ".join((result.stdout + result.stderr).split())


@pytest.fixture
def demo(run, jsonl, tmp_path):
    def invoke(*words: object):
        return run("demo", "--data", jsonl, "--output", tmp_path / "out", *MINIMAL, *words)

    return invoke


def test_the_demonstration_runs_from_documents_to_a_model_read_back(demo, tmp_path):
    result = demo()
    assert result.exit_code == 0
    text = said(result)
    for shown in (
        "80 documents of",
        "trained on them now",
        "lower bound",
        "who attends to whom",
        "real tokens/s",
        "neat_varlen",
        "Exact: no bit passes between documents. The control fails.",
        "the same logits, bit for bit",
        str(tmp_path / "out"),
    ):
        assert shown in text
    # The Trainer's own bar is on stderr, and nothing warns.
    assert "3/3" in result.stderr
    assert "arning" not in result.stderr
    assert max(len(line.rstrip()) for line in result.stdout.split("\n")) <= 80
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="neat_varlen"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer("def return", return_tensors="pt")
    assert torch.isfinite(model(**batch).logits).all()
    report = json.loads((tmp_path / "out" / "demo_report.json").read_text())
    assert report["packing"]["documents"] == 80
    assert len(report["training"]["losses"]) == 3
    assert report["isolation"]["logits_moved"] == 0.0 < report["control"]["logits_moved"]


def test_a_second_run_takes_the_cached_tokenizer_and_gives_the_same_losses(demo, tmp_path):
    path = tmp_path / "out" / "demo_report.json"
    demo()
    first = json.loads(path.read_text())
    assert "read from the cache" in said(demo())
    assert json.loads(path.read_text())["training"]["losses"] == first["training"]["losses"]


def test_the_same_job_runs_on_a_model_of_the_users_own(demo, model_folder, tmp_path):
    result = demo("--model", model_folder)
    assert result.exit_code == 0
    assert "Exact: no bit passes" in said(result)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.config.hidden_size == 32


def test_only_the_documents_asked_for_are_taken_and_the_rest_is_counted(demo):
    assert "the first 20 of 80 documents" in said(demo("--max-documents", 20))


def test_documents_longer_than_the_model_has_positions_are_refused(demo, model_folder, jsonl):
    jsonl.write_text(json.dumps({"text": "def " * 100}) + "\n" + '{"text": "def"}\n')
    result = demo("--model", model_folder, "--max-length", 500)
    assert result.exit_code == 1
    assert "--max-length 64" in said(result)


def test_a_mistyped_option_is_answered_with_the_right_one(demo):
    result = demo("--step", 3)
    assert result.exit_code == 2
    assert "--steps" in result.stderr


def test_a_mistyped_command_or_choice_lists_what_there_is(run):
    assert "plan" in said(run("pln", "x"))
    result = run("plan", "x", "--max-length", 8, "--on-overlong", "cut")
    assert result.exit_code == 2
    assert "'truncate'" in result.stderr


@pytest.mark.parametrize("value", [0, -1, "many"])
def test_a_number_that_makes_no_sense_is_refused_before_any_work(demo, value):
    result = demo("--steps", value)
    assert result.exit_code == 2
    assert "--steps" in result.stderr


def test_a_missing_and_an_empty_file_are_named(run, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for command in (["demo", "--data"], ["pack", "--output", tmp_path / "o", "--max-length", 8]):
        for name, reason in (("missing.jsonl", "no file"), ("empty.jsonl", "is empty")):
            result = run(*command, tmp_path / name)
            assert result.exit_code == 1
            assert reason in said(result)
            assert result.stderr.startswith("Error: ")
    assert not list(tmp_path.glob("o*"))


def test_one_huge_document_alone_cannot_be_packed_with_another(demo, jsonl, tmp_path):
    jsonl.write_text(json.dumps({"text": "def return " * 24 * 40}) + "\n")
    result = demo()
    assert result.exit_code == 1
    assert "larger --max-length" in said(result)
    assert not (tmp_path / "out").exists()


def test_a_huge_document_among_others_is_split_and_counted(demo, jsonl):
    jsonl.write_text(jsonl.read_text() + json.dumps({"text": "def return " * 500}) + "\n")
    result = demo()
    assert result.exit_code == 0
    assert "1 split" in said(result)


def test_an_output_folder_with_other_files_is_refused(demo, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = demo()
    assert result.exit_code == 1
    assert "--output FOLDER" in said(result)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_model_with_its_own_table_of_attentions_is_named(tmp_path):
    config = FalconConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    FalconForCausalLM(config).save_pretrained(tmp_path)
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]})
    with pytest.raises(UnsupportedModelError, match="table of its own"):
        model_for(str(tmp_path), tokens, None, max_length=64, seed=0)


def test_a_model_that_is_not_there_is_named(demo, tmp_path):
    result = demo("--model", tmp_path / "nowhere")
    assert result.exit_code == 1
    # A terminal breaks long paths anywhere.
    assert "nowhere" in said(result).replace(" ", "")


def test_control_c_ends_with_one_line(demo, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_neat_packing.demo.run.train", interrupt)
    result = demo()
    assert result.exit_code == 130
    assert result.stderr.split("\n")[-2:] == ["Stopped.", ""]


def test_a_fault_of_ours_is_not_hidden(monkeypatch, jsonl, tmp_path):
    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("hf_neat_packing.demo.run.train", fail)
    words = ["demo", "--data", str(jsonl), "--output", str(tmp_path / "out"), *MINIMAL]
    assert isinstance(CliRunner().invoke(app, words).exception, ZeroDivisionError)


def test_plan_reports_lengths_and_draws_them_and_writes_nothing(run, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(length) for length in [5, 3, 6, 2, 1]))
    result = run("plan", path, "--max-length", 8)
    assert result.exit_code == 0
    assert "packs         3 of 8 tokens" in result.stdout
    assert "█" in result.stdout
    assert max(map(len, result.stdout.split("\n"))) <= 80
    assert [file.name for file in tmp_path.iterdir()] == ["lengths.txt"]


def test_plan_as_json_is_the_report(run, tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[5, 3, 6, 2, 9]")
    result = run("plan", path, "--max-length", 8, "--on-overlong", "drop", "--json")
    report = PackingReport.from_dict(json.loads(result.stdout))
    assert (report.documents, report.documents_dropped, report.packs) == (5, 1, 2)


def test_plan_says_which_document_is_too_long_and_what_to_choose(run, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n30\n")
    result = run("plan", path, "--max-length", 8)
    assert result.exit_code == 1
    assert "document 1 has 30 tokens" in said(result)
    assert "--on-overlong truncate" in said(result), "what to write on the command line"
    assert run("plan", path, "--max-length", 8, "--on-overlong", "truncate").exit_code == 0


def test_plan_of_text_asks_for_the_tokenizer(run, jsonl, model_folder):
    assert "Write --tokenizer" in said(run("plan", jsonl, "--max-length", 64))
    result = run("plan", jsonl, "--max-length", 64, "--tokenizer", model_folder)
    assert "documents     80" in result.stdout


def test_pack_writes_what_plan_promised_and_refuses_to_overwrite(
    run, jsonl, model_folder, tmp_path
):
    words = ["--max-length", 64, "--tokenizer", model_folder]
    promised = run("plan", jsonl, *words).stdout.split("\n\nlengths")[0]
    output = tmp_path / "packs"
    result = run("pack", jsonl, "--output", output, *words)
    assert result.exit_code == 0
    assert promised in result.stdout
    assert "100%" in result.stderr
    again = run("pack", jsonl, "--output", output, *words)
    assert again.exit_code == 1
    assert "--force" in said(again)
    assert run("pack", jsonl, "--output", output, *words, "--force").exit_code == 0
