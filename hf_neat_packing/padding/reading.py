"""Which token of a row a classifier's head reads: found by gradients, so that it can be handed this token alone.

Legend: `B` rows, `W` their width.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..collator import DataCollatorForNeatPacking
from ..contract import DOCUMENT_MAP_KEY
from ..documents import get_seqlens_in_batch
from ..isolation.conditions import plain_ids, undisturbed
from ..wrappers import unwrap
from .proof import LENGTHS, answer, to_device

Reads = Literal["first token", "last token", "last token that is not padding", "every token"]
"""Which token of a row a head reads."""


def read_tokens(reads: Reads, document_map: Tensor, ids: Tensor, pad: int | None) -> Tensor:
    """Choose the token of each document that a head reads, bool `[B, W]`, one a document.

    Args:
        reads: which one.
        document_map: `[B, W]`, 0 = padding.
        ids: token ids `[B, W]`.
        pad: the id that heads take for padding. A document of it alone is read at its first token.
    """
    real = document_map != 0
    starts = real.clone()
    starts[:, 1:] &= document_map[:, 1:] != document_map[:, :-1]
    if reads == "first token":
        return starts
    number = (starts.flatten().cumsum(0) - 1).clamp(min=0)
    candidates = real if reads == "last token" else real & (ids != pad)
    place = torch.arange(real.numel(), device=real.device)
    # A document's first token is its least candidate, so that none is without one.
    score = torch.where((candidates | starts).flatten(), place, -1)
    last = score.new_full((real.numel(),), -1).scatter_reduce(0, number, score, "amax")
    chosen = torch.zeros_like(real.flatten())
    chosen[last[last >= 0]] = True
    return chosen.view_as(real)


def find_token_read(
    model: nn.Module, backbone: nn.Module, collator: DataCollatorForNeatPacking
) -> Reads:
    """Find by gradients which token of a row a classifier's head reads.

    Args:
        model: the classifier, with hooks that show its head one document a row.
        backbone: what the head reads from.
        collator: writes the packed batch.
    """
    inner = unwrap(model)
    pad = getattr(getattr(inner, "config", None), "pad_token_id", None)
    ids = plain_ids(inner)
    generator = torch.Generator().manual_seed(1)
    rows = [ids[torch.randint(len(ids), (n,), generator=generator)] for n in LENGTHS]
    if pad is not None:
        rows[0][-2:] = pad
    batch = collator([{"input_ids": row} for row in rows])
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    batch = {name: to_device(value, device) for name, value in batch.items()}
    document_map, tokens = batch[DOCUMENT_MAP_KEY], batch["input_ids"]
    lengths = get_seqlens_in_batch(document_map)
    shown = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    with undisturbed(inner), torch.enable_grad():
        leaves = _run_from_leaves(model, backbone, batch)
    for leaf in leaves:
        if leaf.grad is None or leaf.shape[:2] != shown.shape:
            continue
        read = (leaf.grad != 0).any(-1)
        for reads in get_args(Reads)[:-1]:
            expected = shown.new_zeros(shown.shape)
            expected[shown] = read_tokens(reads, document_map, tokens, pad)[document_map != 0]
            if torch.equal(read, expected):
                return reads  # type: ignore[no-any-return]
    return "every token"


def _run_from_leaves(model: nn.Module, backbone: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """Run forward and backward, with what the head and a pooler read as leaves of the graph."""
    leaves: list[Tensor] = []

    def leaf(value: Tensor) -> Tensor:
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (leaf(output[0]), *output[1:])
        output["last_hidden_state"] = leaf(output["last_hidden_state"])
        return output

    handles = [backbone.register_forward_hook(behind)]
    pooler = getattr(backbone, "pooler", None)
    if isinstance(pooler, nn.Module):
        handles.append(pooler.register_forward_pre_hook(lambda _, args: (leaf(args[0]), *args[1:])))
    try:
        answers = answer(type(unwrap(model)).__name__, model, batch)
    finally:
        for handle in handles:
            handle.remove()
    weights = torch.randn(answers.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(
        (answers.float() * weights.to(answers.device)).sum(), leaves, allow_unused=True
    )
    for value, gradient in zip(leaves, gradients, strict=True):
        value.grad = gradient
    return leaves
