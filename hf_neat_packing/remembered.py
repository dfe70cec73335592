"""Dry runs that passed, remembered: a second train start of the same model runs none.

Only passes are kept, under a digest of everything that decides them: versions, code, config, modules, parameters,
hooks, attention key and collator. What cannot be described (a collator of one's own, media, several processes) is
not remembered and runs again. The memory is a small file under `HF_HOME`; one that cannot be read is as good as none.
"""

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from huggingface_hub import constants
from torch import nn

from .dry_run import IsolationProof, LayerProof, prove_isolation
from .fingerprint import fingerprint
from .wrappers import unwrap

_MOST_PROOFS: Final = 32

_KNOWN: dict[str, IsolationProof] = {}


class Proof(NamedTuple):
    """A dry run that passed.

    Attributes:
        isolation: what was measured.
        remembered: whether it was measured at an earlier train start.
    """

    isolation: IsolationProof
    remembered: bool


def prove_isolation_once(model: nn.Module, collator: Any) -> Proof:
    """Run two documents in one row, unless the same was run before and passed; see `prove_isolation`.

    Args:
        model: the model as it is trained, in its wrappers.
        collator: a `DataCollatorForNeatPacking`.

    Raises:
        UnsupportedModelError: naming the class, the first layer that mixes documents, and what to do.
    """
    # Forwards of a sharded model are collective: all processes run it, or none.
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    key = fingerprint(model, collator) if alone else None
    if key is None:
        return Proof(prove_isolation(model, collator), False)
    known = _KNOWN.get(key) or _read().get(key)
    if known is not None:
        _KNOWN[key] = known
        return Proof(known, True)
    proof = prove_isolation(model, collator)
    _KNOWN[key] = proof
    _write(key, proof, type(unwrap(model)).__name__)
    return Proof(proof, False)


def memory_file() -> Path:
    """Name the file that remembers dry runs: `hf_neat_packing/dry_runs.json` under `HF_HOME`."""
    return Path(constants.HF_HOME) / "hf_neat_packing" / "dry_runs.json"


def _read() -> dict[str, IsolationProof]:
    proofs = {}
    for key, entry in _entries().items():
        proof = _proof(entry)
        if proof is not None:
            proofs[key] = proof
    return proofs


def _entries() -> dict[str, Any]:
    try:
        entries = json.loads(memory_file().read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _proof(entry: Any) -> IsolationProof | None:
    """Read one entry; None where it is not what was written, or would be no pass."""
    try:
        layers = tuple(LayerProof(**layer) for layer in entry["layers"])
        values = {name: entry[name] for name in IsolationProof._fields if name != "layers"}
        passed = all(layer.change_in_second <= layer.bound for layer in layers)
    except (TypeError, KeyError):
        return None
    numbers = (values["change_in_second"], values["distance_from_alone"])
    answers = (values["shifts_labels"] in (True, False, None), values["answers_per_token"])
    if not passed or not all(isinstance(x, float) for x in numbers):
        return None
    if not all(isinstance(x, bool) for x in answers) or not answers[0]:
        return None
    return IsolationProof(layers, **values)


def _write(key: str, proof: IsolationProof, model: str) -> None:
    """Add a proof; what cannot be written is not remembered, and nothing else happens."""
    entry = {"model": model, **proof._asdict()}
    entry["layers"] = [layer._asdict() for layer in proof.layers]
    path = memory_file()
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    kept = list(_entries().items())[-_MOST_PROOFS + 1 :]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(kept) | {key: entry}))
        temporary.replace(path)
    except OSError:
        return
