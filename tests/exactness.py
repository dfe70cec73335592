"""What "exact" means, as functions that tests call: no chosen tolerance anywhere.

Isolation and gradient isolation are bit for bit. Parity with the document alone is bounded by what
the dtype itself costs: twice the error that the document alone has against float64, plus rounding.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.offsets import full_stream_cu_seqlens


def packed_inputs(lengths: list[int], *, tail: int = 0, start: int = 0) -> dict[str, Any]:
    """Write the kwargs of a packed row by hand, independently of the collator."""
    document_map = lengths_to_document_map([lengths], row_length=sum(lengths) + tail)
    offsets, longest = full_stream_cu_seqlens(document_map)
    positions = [p for n in [*lengths, *([tail] if tail else [])] for p in range(start, start + n)]
    return {
        "position_ids": torch.tensor([positions]),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def spans(lengths: list[int]) -> list[slice]:
    """Where each document lies in the row."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def leaking_documents(
    logits_of: Callable[[Tensor], Tensor], ids: Tensor, lengths: list[int]
) -> list[tuple[int, int]]:
    """List pairs (changed, moved): changing every token of one document moved a bit of another."""
    with torch.no_grad():
        before = logits_of(ids)
        pairs = []
        for changed, span in enumerate(spans(lengths)):
            other = ids.clone()
            other[:, span] = 3 + (other[:, span] - 3 + 41) % 90
            after = logits_of(other)
            pairs += [
                (changed, moved)
                for moved, view in enumerate(spans(lengths))
                if moved != changed and not torch.equal(before[:, view], after[:, view])
            ]
    return pairs


def gradient_leaks(
    model: torch.nn.Module, inputs: dict[str, Any], ids: Tensor, lengths: list[int]
) -> list[tuple[int, int]]:
    """List pairs (source, target): the gradient of one document's logits reached another's embeddings."""
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, **inputs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits.dtype)
    pairs = []
    for source, span in enumerate(spans(lengths)):
        (gradient,) = torch.autograd.grad(
            (logits[:, span] * weights[:, span]).sum(), embeddings, retain_graph=True
        )
        pairs += [
            (source, target)
            for target, view in enumerate(spans(lengths))
            if target != source and bool((gradient[:, view] != 0).any())
        ]
    return pairs


def run(
    model: torch.nn.Module, ids: Tensor, inputs: dict[str, Any], weights: Tensor
) -> list[Tensor]:
    """Logits `[T, vocabulary]` and the gradient of every parameter for a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, **inputs).logits[0]
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
    return [logits.detach(), *gradients]


def run_alone(
    model: torch.nn.Module, ids: Tensor, lengths: list[int], weights: Tensor
) -> list[Tensor]:
    """The same, one document at a time: logits joined, gradients summed."""
    parts = [run(model, ids[:, span], {}, weights[span]) for span in spans(lengths)]
    gradients = [
        torch.stack(tensors).sum(0) for tensors in zip(*(p[1:] for p in parts), strict=True)
    ]
    return [torch.cat([part[0] for part in parts]), *gradients]


def parity_excess(
    packed_model: torch.nn.Module,
    alone_model: torch.nn.Module,
    ids: Tensor,
    lengths: list[int],
    inputs: dict[str, Any],
) -> float:
    """How far the packed row is from the documents alone, in units of what is allowed; exact: <= 1.

    The truth is `alone_model` in float64; the allowance is twice its own error in the dtype of the
    models plus a rounding band of that dtype.
    """
    num_tokens = sum(lengths)
    vocabulary = alone_model.config.vocab_size
    weights = torch.randn(
        num_tokens, vocabulary, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    tail = inputs["position_ids"].shape[1] - num_tokens
    row = torch.nn.functional.pad(ids, (0, tail))
    truth = run_alone(copy.deepcopy(alone_model).double(), ids, lengths, weights)
    reference = run_alone(alone_model, ids, lengths, weights)
    packed = run(packed_model, row, inputs, torch.nn.functional.pad(weights, (0, 0, 0, tail)))
    packed[0] = packed[0][:num_tokens]
    excess = 0.0
    # Some gradients cancel to nothing (a bias on keys shifts every score alike) and hold only the
    # rounding of the terms, which are as large as the other gradients.
    largest = max(true.norm() for true in truth[1:])
    for true, same, ours in zip(truth, reference, packed, strict=True):
        # A parameter's gradient sums over the tokens of the row, in another order than document by
        # document: the bound of a sum of T terms (Higham 2002, section 4.2) is T * eps / 2 relative.
        scale = true.norm() if true is truth[0] else largest
        band = num_tokens * torch.finfo(ours.dtype).eps / 2 * scale
        allowed = 2 * (same - true).norm() + band
        if allowed > 0:
            excess = max(excess, float((ours - true).norm() / allowed))
    return excess
