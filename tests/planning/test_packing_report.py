"""The report: figures against sums done by hand, and its forms."""

import json
import sys

import numpy as np
import pytest

from hf_neat_packing.errors import MissingDependencyError, PlanningError
from hf_neat_packing.planning import PackingReport, plan_packing


@pytest.fixture
def report():
    lengths = [7, 0, 2, 4, 1, 3, 5, 5, 2, 6]
    return plan_packing(
        lengths, 6, strategy="sequential", on_overlong="truncate", min_length=2
    ).report


def test_figures_are_the_sums_done_by_hand(report):
    pieces = [6, 2, 4, 3, 5, 5, 2, 6]
    assert (report.documents, report.documents_kept, report.documents_dropped) == (10, 8, 2)
    assert (report.dropped_empty, report.dropped_short, report.dropped_overlong) == (1, 1, 0)
    assert (report.tokens, report.tokens_kept) == (35, 33)
    assert (report.tokens_cut, report.tokens_dropped) == (1, 1)
    assert (report.longest_document, report.pieces) == (7, 8)
    assert report.packs == 7
    assert report.lower_bound == 6
    assert report.packs_above_bound == 1
    assert report.fill == pytest.approx(33 / 42)
    assert report.sum_squares == sum(length**2 for length in pieces)
    assert report.sum_squares_padded == 8 * 6**2
    assert report.sum_squares_dense == 7 * 6**2
    assert report.histogram_edges == (2, 4, 8)
    assert report.histogram_counts == (3, 5)


@pytest.mark.parametrize("on_overlong", ["split", "truncate"])
def test_padded_batches_are_those_of_the_order_of_arrival(on_overlong):
    lengths = np.random.default_rng(0).integers(1, 100, 1003)
    report = plan_packing(lengths, 64, on_overlong=on_overlong).report
    pieces = []
    for length in lengths.tolist():
        if on_overlong == "truncate":
            pieces.append(min(length, 64))
        else:
            pieces += [min(64, length - start) for start in range(0, length, 64)]
    batches = [pieces[start : start + 8] for start in range(0, len(pieces), 8)]
    assert report.sum_squares_padded == sum(len(b) * max(b) ** 2 for b in batches)


def test_a_report_survives_json(report, tmp_path):
    assert PackingReport.from_dict(report.to_dict()) == report
    report.save(tmp_path / "report.json")
    assert PackingReport.load(tmp_path / "report.json") == report
    assert json.loads((tmp_path / "report.json").read_text())["tokens_cut"] == 1


def test_a_dictionary_that_is_no_report_is_refused(report):
    data = report.to_dict()
    data["tokenz"] = data.pop("tokens")
    with pytest.raises(PlanningError, match=r"missing \['tokens'\], unknown \['tokenz'\]"):
        PackingReport.from_dict(data)


def test_the_text_names_what_was_lost_and_what_was_saved(report):
    text = str(report)
    assert "2 (0 too long, 1 too short, 1 empty)" in text
    assert "78.57%" in text
    assert "sequential, order of arrival" in text
    assert len(text.splitlines()) == 16


def test_the_terminal_histogram_has_a_line_for_each_bin(report):
    lines = report.histogram_text(width=10).splitlines()
    assert len(lines) == 2
    assert lines[0].count("█") == 6
    assert lines[1].count("█") == 10
    assert lines[1].endswith(" 5")


def test_an_empty_plan_has_a_report_too(tmp_path):
    report = plan_packing([], 8).report
    assert (report.packs, report.sum_squares, report.fill) == (0, 0, 0.0)
    assert report.histogram_text() == ""
    assert "documents" in str(report)
    assert PackingReport.from_dict(report.to_dict()) == report
    report.plot(tmp_path / "empty.png")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_picture_is_written_in_the_form_that_its_suffix_names(report, tmp_path, name, magic):
    report.plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_without_matplotlib_the_picture_names_the_extra(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"hf-neat-packing\[plot\]"):
        report.plot(tmp_path / "a.png")


def test_planning_loads_neither_torch_nor_datasets_nor_matplotlib():
    import subprocess

    script = (
        "import sys, importlib.util, types\n"
        "package = types.ModuleType('hf_neat_packing')\n"
        "package.__path__ = list(importlib.util.find_spec('hf_neat_packing')"
        ".submodule_search_locations)\n"
        "sys.modules['hf_neat_packing'] = package\n"
        "import hf_neat_packing.planning\n"
        "heavy = {'torch', 'datasets', 'transformers', 'matplotlib', 'pyarrow'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
