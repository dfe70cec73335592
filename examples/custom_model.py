"""A model of one's own, trained on packed rows: a recurrent mixer and an attention with its own masks.

The model says what it needs by inheriting two mixins; the collator reads that and writes it. Nothing
else connects them. Run it: it compares packed rows with documents alone, then trains.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.mixins import DocumentIdsMixin, PackedDocuments, RecurrentPackingMixin


class Recurrence(nn.Module):
    """`state = decay * state + input`, from zero at the start of each document."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor, documents: PackedDocuments) -> Tensor:
        """Mix `[rows, length, width]` inside each document."""
        rows, length, width = hidden.shape
        stream = hidden.reshape(rows * length, width)[documents.indices]
        lengths = torch.diff(documents.cu_seqlens).tolist()
        # [documents, longest, width]: each document is a row of its own, so its state begins at zero.
        decay, value, gate = self.gates(
            nn.utils.rnn.pad_sequence(stream.split(lengths), batch_first=True)
        ).chunk(3, dim=-1)
        state = torch.zeros_like(value[:, 0])
        states = []
        for step in range(value.shape[1]):
            state = decay[:, step].sigmoid() * state + value[:, step]
            states.append(state)
        mixed = torch.stack(states, dim=1) * gate.sigmoid()
        stream = torch.cat([row[:n] for row, n in zip(mixed, lengths, strict=True)])
        out = hidden.new_zeros(rows * length, width).index_copy(0, documents.indices, stream)
        return out.reshape(rows, length, width)


class OwnAttention(nn.Module):
    """Causal attention that makes its mask from document numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor, document_ids: Tensor) -> Tensor:
        """Attend inside each document of `[rows, length, width]`."""
        rows, length, width = hidden.shape
        query, key, value = (
            self.project(hidden).reshape(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=same.tril())
        return out.transpose(1, 2).reshape(rows, length, width)


class TinyHybrid(RecurrentPackingMixin, DocumentIdsMixin, nn.Module):
    """A language model with a recurrence and an attention; positions come from the collator."""

    def __init__(self, vocabulary: int = 64, width: int = 32, longest: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.recurrence = Recurrence(width)
        self.attention = OwnAttention(width, heads=4)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        **batch: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits, and the loss where there are labels; `batch` holds the unpadded bundle."""
        documents = self.recurrent_documents(
            {"attention_mask": attention_mask, **batch},
            batch_size=input_ids.shape[0],
            sequence_length=input_ids.shape[1],
        )
        assert documents is not None
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        hidden = hidden + self.recurrence(hidden, documents)
        hidden = hidden + self.attention(hidden, attention_mask)
        logits = self.head(hidden)
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss


def make_documents(count: int = 12) -> list[dict[str, list[int]]]:
    """Counting sequences that start anywhere: easy to learn, and only from a document's own tokens."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 50, (count,), generator=generator).tolist()
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [
        {"input_ids": list(range(start, start + length))}
        for start, length in zip(starts, lengths, strict=True)
    ]


def largest_difference(model: TinyHybrid, documents: list[dict[str, list[int]]]) -> float:
    """Compare the logits of documents in packed rows with those of each document alone."""
    collator = DataCollatorForNeatPacking(model, row_length=32)
    with torch.no_grad():
        batch = collator(documents)
        packed, _ = model(**batch)
        # The collator may order documents anew to fill rows; look each one up by its tokens.
        alone = {
            tuple(document["input_ids"]): model(**collator([document]))[0][0]
            for document in documents
        }
    worst = 0.0
    for row, ids, document_map in zip(
        packed, batch["input_ids"], batch["attention_mask"], strict=True
    ):
        for number in range(1, int(document_map.max()) + 1):
            here = document_map == number
            single = alone[tuple(ids[here].tolist())][: int(here.sum())]
            worst = max(worst, float((row[here] - single).abs().max()))
    return worst


def train(model: TinyHybrid, documents: list[dict[str, list[int]]], steps: int) -> list[float]:
    """Train on packed rows and return the losses."""
    collator = DataCollatorForNeatPacking(model, row_length=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        _, loss = model(**collator(documents))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    hybrid, data = TinyHybrid(), make_documents()
    print(DataCollatorForNeatPacking(hybrid).capabilities)
    print(f"largest difference between packed and alone: {largest_difference(hybrid, data):.1e}")
    history = train(hybrid, data, steps=40)
    print(f"loss: {history[0]:.3f} -> {history[-1]:.3f}")
