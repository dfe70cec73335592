"""Rows of tokens run alone and padded: answers and gradients, and how far two ways of running may part."""

import copy

import torch
from tiny_models import VOCAB


def rows_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def padded(rows, side="right", pad=0):
    """Ids and mask `[B, W]`."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[index, place], mask[index, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model):
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in model.parameters()
        if p.requires_grad
    ]


def answers_and_gradients(model, answer, weights):
    """Run `answer(model)`, a list of tensors, and differentiate their weighted sum."""
    model.zero_grad(set_to_none=True)
    answers = answer(model)
    total = sum((a * w[: len(a)].to(a.dtype)).sum() for a, w in zip(answers, weights, strict=True))
    total.backward()
    return [a.detach() for a in answers], gradients(model)


def excess(model, answer, alone, *, reference=None, coarsest=None):
    """How far answers and gradients are from the truth in units of what is allowed; exact: <= 1.

    The truth is `alone(model)` in float64. Allowed is twice the error of `alone` in the model's own dtype, and a
    rounding band of that dtype.

    Args:
        model: the model.
        answer: from a model to a list of tensors, one a row.
        alone: the same, each row by itself.
        reference: an equal model without hooks; default: `model`.
        coarsest: the coarsest dtype inside a model of several; default: each tensor's own.
    """
    reference = model if reference is None else reference
    with torch.no_grad():
        shapes = [a.shape for a in alone(reference)]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    truth = answers_and_gradients(copy.deepcopy(reference).double(), alone, weights)
    same = answers_and_gradients(reference, alone, weights)
    ours = answers_and_gradients(model, answer, weights)
    terms = sum(shape[0] for shape in shapes)
    worst = 0.0
    for part in (0, 1):
        largest = max(true.norm() for true in truth[part])
        for true, other, mine in zip(truth[part], same[part], ours[part], strict=True):
            if mine.shape != true.shape:
                return float("inf")
            # A gradient is a sum over tokens, in another order (Higham 2002, section 4.2).
            band = terms * torch.finfo(coarsest or mine.dtype).eps / 2 * largest
            allowed = 2 * (other.double() - true).norm() + band
            worst = max(worst, float((mine.double() - true).norm() / allowed))
    return worst
