"""The script that checks a card runs on a CPU too, and reports what fails."""

import copy
import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu_check"), importlib.import_module("gpu_speed")


@pytest.fixture(scope="module")
def report(scripts):
    check, speed = scripts
    shape = {"lengths": [5, 1, 9], "heads": (4, 2), "dims": (16, 8), "left": 3}
    names = ("auto", "torch_varlen", "sdpa")
    return {
        "environment": {"device": "a card", "torch": "2", "transformers": "5"},
        "exactness": [
            {"shape": "small", **check.check_kernel(name, shape, "cpu")} for name in names
        ],
        "synchronisations": check.count_synchronisations("cpu"),
        "steps": speed.measure_steps(64, "cpu", 0.1),
    }


def test_it_passes_where_everything_is_exact_and_names_what_did_not_run(scripts, report):
    check, _ = scripts
    assert check.failures(report) == []
    page = check.gpu_tables(json.loads(json.dumps(report)))
    assert "it needs CUDA tensors" in page
    assert "measured on a GPU only" in page
    ways = {step["way"]: step for step in report["steps"]}
    assert ways["padded, sorted"]["loss"] == pytest.approx(ways["neat_varlen"]["loss"], rel=0.01)


@pytest.mark.parametrize("key", ["within", "isolated", "control_fails"])
def test_a_check_that_fails_is_a_failure(scripts, report, key):
    check, _ = scripts
    broken = copy.deepcopy(report)
    broken["exactness"][0][key] = False
    assert check.failures(broken) == [f"auto, small: not {key}"]


def test_a_leaky_kernel_fails_the_check(scripts, monkeypatch):
    """One causal row over all documents, under the name of a kernel."""
    check, _ = scripts
    sdpa = check.KERNELS["sdpa"]

    def leaky(call):
        whole = call._replace(cu_seqlens=call.cu_seqlens[[0, -1]], lengths=None)
        return sdpa[0](whole)

    monkeypatch.setitem(check.KERNELS, "torch_varlen", (leaky, lambda call: None))
    shape = {"lengths": [5, 1, 9], "heads": (4, 2), "dims": (16, 16)}
    result = check.check_kernel("torch_varlen", shape, "cpu")
    assert not result["within"]
    assert not result["isolated"]


def test_a_wrong_loss_and_waits_of_the_host_are_failures(scripts, report):
    check, _ = scripts
    broken = copy.deepcopy(report)
    broken["steps"][2]["wrong"] = "loss 3"
    broken["synchronisations"] = {"count": 2, "messages": ["item"], "control": 0}
    assert len(check.failures(broken)) == 3


def test_the_tables_go_where_the_page_wants_them(scripts):
    check, _ = scripts
    page = "a\n<!-- gpu -->\nold\n<!-- /gpu -->\nb"
    assert check.in_page(page, "new") == "a\n<!-- gpu -->\nnew\n<!-- /gpu -->\nb"
    with pytest.raises(SystemExit, match="no place"):
        check.in_page("a", "new")
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert "| new |" in check.in_page(readme, "| new |")
