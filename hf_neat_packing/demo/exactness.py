"""Show on one pack that documents do not touch each other, and that the check could have failed.

Nothing here has a tolerance. Every token of one document is replaced: no bit of another document's
logits may move. The loss of one document is differentiated by every token's embedding: outside
that document the gradient is exactly zero. The control runs the same row as one plain causal
sequence, where both must fail.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_neat_packing.errors import ColumnError


@dataclass(frozen=True)
class Isolation:
    """What documents of one pack did to each other.

    Attributes:
        documents: Documents in the pack.
        tokens: Tokens in the pack.
        logits_moved: Largest change of a logit outside the document that was replaced.
        gradient_leaked: Largest gradient of a document's loss by another document's embeddings.
    """

    documents: int
    tokens: int
    logits_moved: float
    gradient_leaked: float

    @property
    def exact(self) -> bool:
        """Whether not a bit passed from document to document."""
        return self.logits_moved == 0.0 and self.gradient_leaked == 0.0


def check_isolation(model: nn.Module, batch: Mapping[str, Any], document_map: Tensor) -> Isolation:
    """Measure what one document does to the others.

    Args:
        model: A causal language model.
        batch: What its forward takes: a row `[1, S]` with boundaries, or without for the control.
        document_map: int `[1, S]`, the document of each token, 1-based, 0 = padding.

    Returns:
        The largest effects; both are exactly 0.0 where documents are isolated.

    Raises:
        ColumnError: If the row has fewer than two documents.
    """
    documents = int(document_map.max())
    if documents < 2:
        raise ColumnError(
            "The pack to check holds one document, which has no other to leak into. Give documents "
            "shorter than half of --max-length, or a larger --max-length."
        )
    # One early in the row: in a plain causal row, all later ones would see it.
    changed = document_map == 1
    was_training = model.training
    model.eval()
    try:
        moved = _logits_moved(model, batch, changed)
        leaked = _gradient_leaked(model, batch, document_map == documents)
    finally:
        model.train(was_training)
    return Isolation(documents, int((document_map > 0).sum()), moved, leaked)


def plain_row(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make the control: the same tokens as one causal sequence, boundaries left out.

    Args:
        batch: A packed batch with `input_ids` and `labels`, `[1, S]`.
    """
    tokens = batch["input_ids"]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return {
        "input_ids": tokens,
        "labels": batch["labels"],
        "position_ids": positions,
        "attention_mask": torch.ones_like(tokens),
    }


@torch.no_grad()
def _logits_moved(model: nn.Module, batch: Mapping[str, Any], changed: Tensor) -> float:
    """Replace the tokens of a document, and look at the logits of the others."""
    tokens = batch["input_ids"]
    # Token 1 becomes 0 and every other one its predecessor: none stays, and none is out of range.
    others = torch.where(tokens == 0, torch.ones_like(tokens), tokens - 1)
    replaced = torch.where(changed, others, tokens)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    before = model(**inputs).logits[~changed]
    after = model(**{**inputs, "input_ids": replaced}).logits[~changed]
    return 0.0 if torch.equal(before, after) else float((before - after).abs().max())


def _gradient_leaked(model: nn.Module, batch: Mapping[str, Any], own: Tensor) -> float:
    """Differentiate the loss of one document, and look at the embeddings of the others."""
    labels = torch.where(own, batch["labels"], -100)
    with _embeddings(model) as seen:
        loss = model(**{**batch, "labels": labels}).loss
        (gradient,) = torch.autograd.grad(loss, seen)
    assert gradient[own].count_nonzero() > 0, "a document's loss depends on its own tokens"
    return float(gradient[~own].abs().max())


@contextmanager
def _embeddings(model: Any) -> Iterator[list[Tensor]]:
    """Keep the embeddings of a forward as something to differentiate by."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        seen.append(leaf)
        return leaf

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()
