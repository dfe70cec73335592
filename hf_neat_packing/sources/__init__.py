"""What the commands read: documents from files, folders and ids, their tokens and their lengths."""

from hf_neat_packing.sources.documents import load_documents
from hf_neat_packing.sources.lengths import document_lengths, load_lengths
from hf_neat_packing.sources.tokens import TOKEN_COLUMN, load_tokenizer, text_column, token_ids

__all__ = [
    "TOKEN_COLUMN",
    "document_lengths",
    "load_documents",
    "load_lengths",
    "load_tokenizer",
    "text_column",
    "token_ids",
]
