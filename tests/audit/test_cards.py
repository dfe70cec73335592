import json
import re

import pytest
import torch

from hf_neat_packing.audit import assert_isolated
from hf_neat_packing.audit.card_values import loading_snippet
from hf_neat_packing.audit.cards import MOST_USED, render_cards, stale_cards, write_cards
from hf_neat_packing.audit.gpu_tables import read_gpu_report
from hf_neat_packing.audit.zoo import model_types, tiny_model
from hf_neat_packing.audit.zoo_run import RESULTS, audit_type, read_results


@pytest.fixture(scope="module")
def results():
    return [audit_type(name, ["neat_varlen", "eager"]) for name in ("llama", "lfm2", "bert:masked")]


def test_sixty_most_used_types_exist_in_the_zoo():
    assert len(MOST_USED) >= 60
    assert set(MOST_USED) <= set(model_types())


def test_a_family_has_a_card_and_every_type_is_in_the_index(results):
    pages = render_cards(results)
    assert set(pages) == {"README.md", "llama.md", "lfm2.md", "bert.md"}
    assert "[`lfm2`](lfm2.md)" in pages["README.md"]
    assert "isolate(model)" in pages["lfm2.md"]
    assert "isolate(model)" not in pages["llama.md"].split("## Error")[0]
    assert "hf-neat-packing audit lfm2 --attn neat_varlen" in pages["lfm2.md"]


def test_cards_are_stale_when_a_number_changes(results, tmp_path):
    write_cards(results, tmp_path)
    assert stale_cards(render_cards(results), tmp_path) == []
    card = tmp_path / "llama.md"
    card.write_text(card.read_text().replace("exact", "exakt", 1))
    (tmp_path / "gone.md").write_text("old")
    (tmp_path / "bert.md").unlink()
    stale = {path.name for path in stale_cards(render_cards(results), tmp_path)}
    assert stale == {"llama.md", "gone.md", "bert.md"}
    write_cards(results, tmp_path)
    assert stale_cards(render_cards(results), tmp_path) == []


@pytest.mark.parametrize("index", range(3), ids=["llama", "lfm2", "bert:masked"])
def test_the_snippet_of_a_card_loads_a_model_that_is_exact(results, index, tmp_path):
    result = results[index]
    tiny_model(result["model_type"]).save_pretrained(tmp_path)
    names: dict = {}
    exec(loading_snippet(result).replace("path/to/your/model", str(tmp_path)), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    batch = names["collator"]([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}])
    assert_isolated(model, batch)


def test_the_committed_pages_are_what_the_committed_results_say():
    results = read_results(RESULTS)
    assert results, f"{RESULTS} is missing; make it with `hf-neat-packing audit --zoo`"
    assert stale_cards(render_cards(results, read_gpu_report())) == []


def test_the_committed_results_hold_the_bar():
    results = {result["model_type"]: result["runs"] for result in read_results(RESULTS)}
    assert set(results) == set(model_types())
    verdicts = [run["verdict"] for runs in results.values() for run in runs]
    assert not {"wrong", "inconclusive", "raises"} & set(verdicts)
    for key, least in (("neat_varlen", 190), ("sdpa", 150), ("eager", 150)):
        exact = [
            name
            for name, runs in results.items()
            if ":" not in name
            and all(run["verdict"] == "exact" for run in runs if run["attention"] == key)
        ]
        assert len(exact) >= least, key


def test_a_card_shows_no_absolute_path_or_address(results):
    for page in render_cards(results).values():
        assert not re.search(r"/(home|work|tmp)/|https?://", page)


def test_the_index_shows_what_a_card_was_measured_to_do(results, tmp_path):
    report = {
        "environment": {"device": "A card", "torch": "2", "transformers": "5"},
        "exactness": [
            {"kernel": "auto", "shape": "window", "error_of_allowed": 0.5, "isolated": True},
            {"kernel": "fa", "shape": "window", "not_run": "it is not installed"},
        ],
        "synchronisations": {"count": 0},
        "steps": [
            {
                "tokens": 4096, "way": "neat_varlen", "tokens_per_second": 123456.7, "ratio": 1.0,
                "peak_gib": 2.5, "loss": 8.3,
            }
        ],
    }  # fmt: skip
    path = tmp_path / "gpu.json"
    assert read_gpu_report(path) is None
    path.write_text(json.dumps(report))
    index = render_cards(results, read_gpu_report(path))["README.md"]
    assert "A card, torch 2, transformers 5, bfloat16." in index
    assert "| auto | window | 0.50 | yes |" in index
    assert "| 4096 | neat_varlen | 123,457 | 1.00 | 2.50 | 8.3000 |" in index
    assert "On a GPU" not in render_cards(results)["README.md"]
