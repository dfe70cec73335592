"""A byte-level BPE tokenizer, trained on the documents themselves and kept for the next run."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"


def demo_tokenizer(
    documents: Sequence[str], *, vocab_size: int = 4096, cache: Path | None = None
) -> tuple[Any, bool]:
    """Train a tokenizer on the documents, or read the one that was trained on them before.

    Args:
        documents: Texts.
        vocab_size: Entries of the vocabulary, at least 257: the bytes and the end of a text.
        cache: Folder for trained tokenizers; by default beside the caches of the Hugging Face
            libraries (`$HF_HOME/hf_neat_packing`).

    Returns:
        A `PreTrainedTokenizerFast`, whose end-of-text token is also its padding token, and whether
        it came from the cache.
    """
    from huggingface_hub.constants import HF_HOME
    from tokenizers import Tokenizer

    folder = Path(HF_HOME) / "hf_neat_packing" if cache is None else cache
    path = folder / f"tokenizer-{_fingerprint(documents, vocab_size)}.json"
    if path.is_file():
        return _wrap(Tokenizer.from_file(str(path))), True
    tokenizer = _train(documents, vocab_size)
    _keep(tokenizer, path)
    return _wrap(tokenizer), False


def _fingerprint(documents: Sequence[str], vocab_size: int) -> str:
    digest = hashlib.blake2b(str(vocab_size).encode(), digest_size=8)
    for document in documents:
        digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _train(documents: Sequence[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Every byte, so that any later text has tokens.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def _keep(tokenizer: Any, path: Path) -> None:
    """Write under another name first: a run that is killed here leaves no half a tokenizer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".unfinished")
        os.close(handle)
        try:
            tokenizer.save(unfinished)
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except OSError:
        # A cache that cannot be written costs the next run some seconds and nothing else.
        return


def _wrap(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
