"""What every test needs: nothing of one is found by another, and the home of who runs them is left alone."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_memory(tmp_path_factory, monkeypatch):
    """No test finds the dry run of another one remembered, or writes one down outside."""
    folder = tmp_path_factory.getbasetemp() / f"hf_home_{os.urandom(8).hex()}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(folder))
    monkeypatch.setattr("hf_neat_packing.remembered._KNOWN", {})
