"""Sequence packing for Hugging Face Transformers, exact for every document or an error.

Importing the package registers the attention key `neat_varlen` with transformers.
"""

from .attention import ATTENTION_KEY, register

__all__ = ["ATTENTION_KEY", "register"]

register()
