"""The benchmark runs, checks the planners it is given, and catches one that loses documents."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planning.py"


def run(monkeypatch, *arguments):
    small = ["--without-trl", "--n", "300", "--inputs", "chat", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small, *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def planners(tmp_path, monkeypatch):
    body = "def {0}(lengths, max_length):\n    return [[i] for i in range(len(lengths) - {1})]\n"
    (tmp_path / "other_planners.py").write_text(body.format("alone", 0) + body.format("lossy", 1))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("planners")
def test_a_planner_given_by_path_is_measured_beside_ours(monkeypatch, capsys):
    run(monkeypatch, "--planner", "other_planners:alone", "--memory")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["bfd", "best_fit", "other_planners:alone"]


@pytest.mark.usefixtures("planners")
def test_a_planner_that_loses_a_document_ends_the_run(monkeypatch):
    with pytest.raises(SystemExit, match="missing or doubled"):
        run(monkeypatch, "--planner", "other_planners:lossy")
