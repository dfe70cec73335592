"""Custom models that mix the documents of a row, each in a way of its own, and what tests ask of them."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
HIDDEN = 32


class Recurrent(nn.Module):
    """A GRU over the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.cell(hidden)[0]


class RowMean(nn.Module):
    """Adds the mean over the row: neither causal nor indifferent to padding."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(1, keepdim=True)


class FaintMean(nn.Module):
    """Adds so little of the row's mean that it may pass for rounding."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.share * hidden.mean(1, keepdim=True)


class ConvolutionalHead(nn.Module):
    """A causal convolution in front of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(HIDDEN, HIDDEN, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        padded = nn.functional.pad(hidden.transpose(1, 2), (2, 0))
        return self.kernel(padded).transpose(1, 2)


class RemembersCalls(nn.Module):
    """Adds what the previous call ended with: no document is ever alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        before = 0.0 if self.last is None else self.last
        self.last = hidden.detach().mean()
        return hidden + before


class TinyModel(nn.Module):
    """Token and learned absolute positions, one mixing layer, logits; nothing of transformers in it."""

    packed_mask_type = "flash_varlen"

    def __init__(self, layer: nn.Module, *, positions: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(128, HIDDEN) if positions else None
        self.layer = layer
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        hidden = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.places is not None:
            hidden = hidden + self.places(torch.arange(hidden.shape[1]))
        return self.head(self.layer(hidden))


class TinyModelThatShowsItsEmbeddings(TinyModel):
    """Says where its token embeddings are, as models of transformers do."""

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def tiny(layer: nn.Module, **options: Any) -> TinyModel:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return TinyModel(layer, **options).eval()


def documents(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 60, (length,), generator=generator) for length in lengths]


def values(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if logits is not None:
        return logits
    return output if isinstance(output, Tensor) else output[0]
