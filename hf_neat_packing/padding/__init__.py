"""Padded batches run packed: laid into one row, and what the model says about it put back."""

from .batches import pack_padded, unpack_to_padded
from .hooks import PaddingFree, pack_sequence_classifier, padding_free

__all__ = [
    "PaddingFree",
    "pack_padded",
    "pack_sequence_classifier",
    "padding_free",
    "unpack_to_padded",
]
