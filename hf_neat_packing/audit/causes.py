"""Why one document reaches another: the causes that were found in the models of transformers, in words."""

from dataclasses import dataclass
from typing import Final

from torch import nn

from .._compat import attention_key, mask_kinds
from ..contract import VARLEN_KEYS
from ..layouts import reads_varlen_kwargs
from .localise import Call, Place


@dataclass(frozen=True)
class Cause:
    """A cause and what to do about it.

    Attributes:
        code: short name, as cards and tables use it.
        words: what happens.
        advice: what to do.
    """

    code: str
    words: str
    advice: str


_ISOLATE = (
    "Call `isolate(model)` from `hf_neat_packing.isolation` after loading: it measures where documents meet and "
    "attaches the hook that keeps them apart."
)

STATE_BETWEEN_CALLS: Final = Cause(
    "state",
    "the module keeps state from one call to the next, so a batch depends on the batch before it",
    "Reset that state at the start of each forward, or switch the cache or the running statistics off for training.",
)
RECURRENT: Final = Cause(
    "R",
    "a recurrent state, a convolution or a token shift runs on across document borders",
    _ISOLATE,
)
MASK_WITHOUT_BOUNDARIES: Final = Cause(
    "M",
    "attention got a mask that was built without the document boundaries, and no offsets: the mask builder was not "
    "given the positions, or a padding mask of the model's own switched their detection off",
    _ISOLATE,
)
OWN_MASK_CODE: Final = Cause(
    "own code",
    "attention is the model's own code and reads neither the boundaries nor the mask of the batch",
    _ISOLATE,
)
SPARSE_ON_ROW: Final = Cause(
    "S",
    "sparse attention lays its blocks or compressed keys on slots of the row, not of the document",
    _ISOLATE,
)
PATCHES: Final = Cause("B", "patches are cut from the whole row, across documents", _ISOLATE)
HASHING: Final = Cause(
    "L", "hashed or chunked attention sorts the tokens of the whole row", _ISOLATE
)
ROW_STATISTICS: Final = Cause(
    "row",
    "the module mixes the tokens of a whole row (a mean, a norm, pooling or routing over the row)",
    "Compute that statistic for each document, or run the module per document: `isolate(model)` from "
    "`hf_neat_packing.isolation` can do it where the module takes one row per document.",
)
POSITIONS_IGNORED: Final = Cause(
    "P",
    "`position_ids` have no effect: positions run on through the row instead of restarting in each document",
    _ISOLATE,
)
WINDOW_LOST: Final = Cause(
    "W",
    "documents longer than the attention window differ: the window is not in the mask that this layer got",
    'Load the model with attn_implementation="neat_varlen", which applies windows inside documents.',
)
ROW_INDEX: Final = Cause(
    "T",
    "documents are isolated, but the result depends on where in the row a document lies: something is computed from "
    "the row index (a temperature, a table) instead of from `position_ids`",
    _ISOLATE,
)
ROPE_BY_LONGEST: Final = Cause(
    "rope",
    "the rotary frequencies are chosen from the longest position of the batch, so one long document changes short ones",
    "Keep every document within the original length of the model, or train long and short ones in separate batches. "
    + _ISOLATE,
)
BACKWARD: Final = Cause(
    "backward",
    "the forward is right and the backward is not: what activation checkpointing computes again differs from what "
    "was computed first, as when a hook is removed between the two",
    "Remove hooks only after `backward()` (and after the last optimizer step of the run).",
)
ROUNDING_OR_UNKNOWN: Final = Cause(
    "?",
    "the outputs differ from each document alone by more than rounding explains, with documents isolated",
    "Compare this attention key with `eager`; the module named is the first that differs.",
)

_STATE_PARAMETERS = frozenset({"A_log", "dt_bias", "time_decay", "time_first", "recurrent_param"})
_NAMED = (
    (("indexer", "compress", "sparse"), SPARSE_ON_ROW),
    (("lsh", "localselfattention"), HASHING),
    (("patch",), PATCHES),
)


def leak_cause(place: Place, call: Call) -> Cause:
    """Say why a module lets one document reach another.

    Args:
        place: of the first module that does.
        call: what it was called with.
    """
    if _is_recurrent(place, call.module):
        return RECURRENT
    inside = " ".join(type(child).__name__.lower() for child in call.module.modules())
    for words, cause in _NAMED:
        if any(word in inside for word in words):
            return cause
    if isinstance(getattr(call.module, "is_causal", None), bool):
        return OWN_MASK_CODE if _was_told(call) else MASK_WITHOUT_BOUNDARIES
    names = f"{place.class_name} {place.name}".lower()
    if "attention" in names or "attn" in names:
        return OWN_MASK_CODE
    return ROW_STATISTICS


def _was_told(call: Call) -> bool:
    """Whether offsets reached an attention whose key reads them."""
    key = attention_key(getattr(call.module, "config", None))
    arrived = all(call.arguments.get(name) is not None for name in VARLEN_KEYS)
    return arrived and key is not None and reads_varlen_kwargs(key)


def _is_recurrent(place: Place, module: nn.Module) -> bool:
    if any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.modules()):
        return True
    if isinstance(module, (nn.ZeroPad2d, nn.ConstantPad1d)):
        return True  # a token shift
    own = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
    own |= {name for name, _ in place.parent.named_parameters(recurse=False)}
    if own & _STATE_PARAMETERS:
        return True
    if isinstance(getattr(module, "is_causal", None), bool):
        return False
    kinds = mask_kinds(place.layer_type) or {}
    return "recurrent" in kinds.values()
