"""Small models that reach only SDPA, and what each of their documents gives alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_neat_packing.positions import position_ids_from_document_map

VOCABULARY = 50


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = position_ids[:, None, :, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    """Grouped heads; reaches SDPA by attribute or under the name it was imported by."""

    def __init__(self, width, heads=4, key_heads=2, *, spelling="attribute", dropout=0.0):
        super().__init__()
        self.heads, self.key_heads, self.spelling, self.dropout = (
            heads,
            key_heads,
            spelling,
            dropout,
        )
        dim = width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * dim) for n in (heads, key_heads, key_heads))
        self.o = nn.Linear(width, width)

    def forward(self, x, position_ids, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for layer, n in (
                (self.q, self.heads),
                (self.k, self.key_heads),
                (self.v, self.key_heads),
            )
        )
        q, k = rotate(q, position_ids), rotate(k, position_ids)
        dropout = self.dropout if self.training else 0.0
        options = {
            "is_causal": mask is None,
            "attn_mask": mask,
            "dropout_p": dropout,
            "enable_gqa": True,
        }
        if self.spelling == "eager":
            k, v = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (k, v))
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(
                ~causal, -torch.inf
            )
            out = scores.softmax(-1) @ v
        elif self.spelling == "attribute":
            out = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            out = scaled_dot_product_attention(q, k, v, **options)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, **options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = Attention(width, **options)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, position_ids, mask=None):
        x = x + self.self_attn(self.norm1(x), position_ids, mask=mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder as remote code writes it: no boundaries among its inputs."""

    def __init__(self, layers=2, width=16, *, seed=0, recompute=None, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, **options) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)
        self.recompute = recompute
        self.to(torch.float64)

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, mask=None):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            if self.recompute is None or not torch.is_grad_enabled():
                x = layer(x, position_ids, mask)
            elif self.recompute == "closure":
                x = checkpoint(
                    lambda x=x, layer=layer: layer(x, position_ids, mask), use_reentrant=False
                )
            else:
                x = checkpoint(
                    layer, x, position_ids, mask, use_reentrant=self.recompute == "reentrant"
                )
        return self.head(x)


def make_batch(document_map, seed=0):
    """Random tokens with restarting positions, and an upstream gradient that is zero at padding."""
    document_map = torch.as_tensor(document_map)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(
        *document_map.shape, VOCABULARY, generator=generator, dtype=torch.float64
    )
    return {
        "input_ids": torch.randint(1, VOCABULARY, document_map.shape, generator=generator),
        "position_ids": position_ids_from_document_map(document_map),
        "_packed_seq_ids": document_map,
    }, upstream * (document_map != 0)[..., None]


def alone(model, batch, upstream, logits_of=lambda output: output):
    """Run each document by itself: its logits, laid out as in the pack, and the summed gradients."""
    document_map = batch["_packed_seq_ids"]
    model.zero_grad()
    logits = torch.zeros_like(upstream)
    for row in range(document_map.shape[0]):
        for number in sorted(set(document_map[row].tolist()) - {0}):
            where = document_map[row] == number
            inputs = {
                name: batch[name][row, where][None]
                for name in ("input_ids", "position_ids")
                if name in batch
            }
            output = logits_of(model(**inputs))
            output.backward(upstream[row, where][None])
            logits[row, where] = output[0].detach()
    return logits, gradients(model)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


MAPS = {
    "full": [[1, 1, 1, 2, 2, 3, 3, 3], [1, 2, 2, 2, 2, 2, 3, 3]],
    "tail": [[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 2, 2, 2]],
    "between": [[1, 1, 0, 0, 2, 2, 2, 3]],
    "inside": [[1, 0, 1, 1, 2, 0, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]],
    "one": [[1, 1, 1, 1, 1, 1, 1, 1]],
}
