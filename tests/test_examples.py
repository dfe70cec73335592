"""The examples run as a user runs them: in a process and a folder of their own, offline."""

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

import hf_neat_packing  # noqa: F401  # registers neat_varlen

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(folder: Path, name: str, *words: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        cwd=folder,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(shown: str, name: str = "loss") -> list[float]:
    return [float(value) for value in re.findall(rf"'{name}': '([\d.]+)'", shown)]


def test_the_quickstart_is_short_and_its_loss_falls(tmp_path):
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 30
    shown = run(tmp_path, "quickstart.py")
    assert "lower bound" in shown
    falling = losses(shown)
    assert len(falling) == 3
    assert falling[-1] < falling[0]


def test_fine_tuning_learns_evaluates_saves_and_reloads(tmp_path):
    shown = run(tmp_path, "trainer_sft.py", "--output", "out")
    assert losses(shown)[-1] < losses(shown)[0]
    assert losses(shown, "eval_loss")[-1] < losses(shown, "eval_loss")[0]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="neat_varlen"
    )
    assert model.config.hidden_size == 128


def test_fine_tuning_takes_a_model_and_data_of_the_users_own(tmp_path):
    data = tmp_path / "my.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 20)
    run(tmp_path, "trainer_sft.py", "--output", "first", "--steps", "2")
    words = ["--model", "first", "--data", "my.jsonl", "--output", "second", "--steps", "4"]
    shown = run(tmp_path, "trainer_sft.py", *words)
    assert "documents     18" in shown
    assert "1+1=" in shown.splitlines()[-1]


def test_trl_fine_tunes_chats_on_packs(tmp_path):
    shown = run(tmp_path, "trl_sft.py", "--output", "out")
    assert re.search(r"\d+ chats in \d+ packs", shown)
    assert losses(shown)[-1] < losses(shown)[0]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_preferences_are_learned_padding_free(tmp_path):
    shown = run(tmp_path, "dpo.py", "--output", "out")
    assert losses(shown)[-1] < losses(shown)[0]
    assert losses(shown, "rewards/margins")[-1] > 0
    assert (tmp_path / "out" / "model.safetensors").exists()
