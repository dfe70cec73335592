"""What "exact" means for rows with images: the measures of `exactness`, over documents with media."""

import copy

import torch

TOKEN_COLUMNS = ("input_ids", "mm_token_type_ids", "token_type_ids")


def alone(document):
    """The inputs of one document by itself, as a processor hands them to the model."""
    inputs = {}
    for name, value in document.items():
        if name in TOKEN_COLUMNS:
            inputs[name] = torch.tensor(value)[None]
        elif value is not None:
            inputs[name] = value
    return inputs


def spans(documents):
    """Where each document lies in the row."""
    ends = torch.tensor([len(d["input_ids"]) for d in documents]).cumsum(0).tolist()
    return [slice(end - len(d["input_ids"]), end) for end, d in zip(ends, documents, strict=True)]


def as_dtype(inputs, dtype):
    """Pixels in the dtype of the model."""
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def run(model, inputs, weights):
    """Logits `[T, vocabulary]` and the gradient of every parameter for a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**as_dtype(inputs, model.dtype), use_cache=False).logits[0]
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
    return [logits.detach(), *gradients]


def run_alone(model, documents, weights):
    """The same, one document at a time: logits joined, gradients summed."""
    parts = [
        run(model, alone(document), weights[span])
        for document, span in zip(documents, spans(documents), strict=True)
    ]
    gradients = [
        torch.stack(tensors).sum(0) for tensors in zip(*(p[1:] for p in parts), strict=True)
    ]
    return [torch.cat([part[0] for part in parts]), *gradients]


def parity_excess(packed_model, alone_model, documents, batch):
    """How far a packed row is from its documents alone, in units of what is allowed; exact: <= 1.

    As `exactness.parity_excess`: the truth is `alone_model` in float64, the allowance twice its own
    error in the dtype of the models plus a rounding band of that dtype.
    """
    num_tokens = sum(len(document["input_ids"]) for document in documents)
    weights = torch.randn(
        batch["input_ids"].shape[1],
        alone_model.config.get_text_config().vocab_size,
        generator=torch.Generator().manual_seed(7),
        dtype=torch.float64,
    )
    weights[num_tokens:] = 0
    truth = run_alone(copy.deepcopy(alone_model).double(), documents, weights)
    reference = run_alone(alone_model, documents, weights)
    packed = run(packed_model, batch, weights)
    packed[0] = packed[0][:num_tokens]
    largest = max(true.norm() for true in truth[1:])
    # The sums over a row run over its tokens, and those of the tower over its patches.
    media = [batch.get(name) for name in ("pixel_values", "pixel_values_videos")]
    terms = num_tokens + sum(len(pixels) for pixels in media if pixels is not None)
    excess = 0.0
    for true, same, ours in zip(truth, reference, packed, strict=True):
        scale = true.norm() if true is truth[0] else largest
        band = terms * torch.finfo(ours.dtype).eps / 2 * scale
        allowed = 2 * (same - true).norm() + band
        excess = max(excess, float((ours - true).norm() / allowed))
    return excess


def changed(document, placeholders):
    """The same document with other text and other pixels."""
    ids = [
        token if token in placeholders else 3 + (token - 3 + 31) % 77
        for token in document["input_ids"]
    ]
    other = {**document, "input_ids": ids}
    for name in ("pixel_values", "pixel_values_videos"):
        if document.get(name) is not None:
            other[name] = -2 * document[name] + 1
    return other


def leaking_documents(model, documents, collate, placeholders):
    """List pairs (changed, moved): changing one document moved a bit of another's logits."""

    def logits_of(row):
        batch = collate(row)
        with torch.no_grad():
            return model(
                **{k: v for k, v in batch.items() if k != "labels"}, use_cache=False
            ).logits

    before = logits_of(documents)
    pairs = []
    for index, document in enumerate(documents):
        row = [*documents[:index], changed(document, placeholders), *documents[index + 1 :]]
        after = logits_of(row)
        pairs += [
            (index, moved)
            for moved, span in enumerate(spans(documents))
            if moved != index and not torch.equal(before[:, span], after[:, span])
        ]
    return pairs


def pixel_gradient_leaks(model, documents, batch):
    """List pairs (source, target): the gradient of one document's logits reached another's pixels."""
    name = "pixel_values" if "pixel_values" in batch else "pixel_values_videos"
    pixels = batch[name].clone().requires_grad_()
    owners = torch.cat(
        [
            torch.full((len(document[name]),), index)
            for index, document in enumerate(documents)
            if document.get(name) is not None
        ]
    )
    inputs = {k: v for k, v in batch.items() if k != "labels"} | {name: pixels}
    logits = model(**inputs, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    pairs, own = [], []
    for source, span in enumerate(spans(documents)):
        part = (logits[:, span] * weights[:, span]).sum()
        (gradient,) = torch.autograd.grad(part, pixels, retain_graph=True)
        for target in owners.unique().tolist():
            if bool((gradient[owners == target] != 0).any()):
                (own if target == source else pairs).append((source, target))
    assert own, "the control: a document's own pixels matter"
    return pairs
