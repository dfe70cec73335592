"""What every test needs: nothing of one is found by another, and the home of who runs them is left alone."""

import os

import pytest

# Files that start processes or compile: begun first, so that no worker is left alone with one at the end.
SLOW = (
    "test_distributed.py",
    "test_compiled.py",
    "test_examples.py",
    "test_ray_shards.py",
    "test_compat.py",
    "test_trl.py",
    "test_accelerate_launch.py",
    "test_contract_pipeline.py",
    "test_recompute.py",
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.path.name, len(SLOW)))


@pytest.fixture(autouse=True)
def no_memory(tmp_path_factory, monkeypatch):
    """No test finds the dry run of another one remembered, or writes one down outside."""
    folder = tmp_path_factory.getbasetemp() / f"hf_home_{os.urandom(8).hex()}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(folder))
    monkeypatch.setattr("hf_neat_packing.remembered._KNOWN", {})
