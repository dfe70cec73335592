"""Why one document reaches another: the causes that were found in the models of transformers, in words."""

from dataclasses import dataclass
from typing import Final

from torch import nn

from .._compat import mask_kinds
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
    "M0",
    "attention got a mask that was built without the document boundaries, and no offsets: the model calls the mask "
    "builder without the positions, from which it would find the documents",
    _ISOLATE,
)
MASK_OF_ALL_ONES: Final = Cause(
    "M1",
    "attention got a mask that was built without the document boundaries, and no offsets: where the batch has no "
    "padding mask the model makes one of all ones, which switches the detection of documents off",
    _ISOLATE,
)
MASK_IN_BATCH: Final = Cause(
    "mask",
    "the batch brings a 2-D padding mask, which switches off that documents are found by restarting positions",
    "Leave `attention_mask` out; build batches with `DataCollatorForNeatPacking(model)`.",
)
CACHE: Final = Cause(
    "cache",
    "the model builds a cache, which switches off that documents are found by restarting positions",
    'Pass `use_cache=False`; or load the model with attn_implementation="neat_varlen" and build batches with '
    "`DataCollatorForNeatPacking(model)`, whose boundaries need no detection.",
)
OWN_MASK_CODE: Final = Cause(
    "M2",
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
LABELS_OF_ANOTHER_LOSS: Final = Cause(
    "labels",
    "the first label of each document is treated for another loss than the model's own: one compares a token with "
    "the next one's label, the other with its own",
    "Write `DataCollatorForNeatPacking(model, shifted_labels=...)`, or attach `isolate(model)` first: it measures it.",
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

    Returns:
        `OWN_MASK_CODE` for every attention; `mask_causes` tells whether its mask is the cause.
    """
    if _is_recurrent(place, call.module):
        return RECURRENT
    inside = " ".join(type(child).__name__.lower() for child in call.module.modules())
    for words, cause in _NAMED:
        if any(word in inside for word in words):
            return cause
    names = f"{place.class_name} {place.name}".lower()
    if isinstance(getattr(call.module, "is_causal", None), bool) or "att" in names:
        return OWN_MASK_CODE
    return ROW_STATISTICS


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
