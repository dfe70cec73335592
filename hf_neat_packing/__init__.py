"""Sequence packing for Hugging Face Transformers, exact for every document or an error.

Importing the package registers the attention key `neat_varlen` with transformers.
"""

from .attention import ATTENTION_KEY, register
from .collator import DataCollatorForNeatPacking
from .dataset import pack_dataset

__all__ = ["ATTENTION_KEY", "DataCollatorForNeatPacking", "pack_dataset", "register"]

register()
