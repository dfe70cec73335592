"""Models that mix documents on purpose, each in one way."""

import torch
from torch import nn

import hf_neat_packing  # noqa: F401  (registers the key)
from hf_neat_packing.audit.zoo import tiny_model


class LeakyConvHead(nn.Module):
    """A convolution in front of the head: three tokens wide, across borders."""

    def __init__(self, head: nn.Module, size: int) -> None:
        super().__init__()
        self.head = head
        self.conv = nn.Conv1d(size, size, 3, padding=2)
        nn.init.normal_(self.conv.weight, std=0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]]
        return self.head(hidden + mixed.transpose(1, 2))


class CentredByRow(nn.Module):
    """Subtracts the mean over the row: harmless for one document, wrong for several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        return hidden - hidden.mean(1, keepdim=True)


class RemembersLastCall(nn.Module):
    """Adds something of the batch before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        result = hidden if self.last is None else hidden + self.last
        self.last = hidden.detach().mean((0, 1))
        return result


class ShiftsByRowIndex(nn.Module):
    """Scales by the index in the row instead of the position in the document."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index = torch.arange(hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        return self.inner(hidden) * (1 + 0.1 * (index // 8))[:, None]


def llama(key: str = "neat_varlen") -> nn.Module:
    return tiny_model("llama", attn_implementation=key)


def with_leaky_conv_head() -> nn.Module:
    model = llama()
    model.lm_head = LeakyConvHead(model.lm_head, model.config.hidden_size)
    return model.eval()


def with_norm(wrapper: type[nn.Module]) -> nn.Module:
    model = llama()
    layer = model.model.layers[1]
    layer.input_layernorm = wrapper(layer.input_layernorm)
    return model.eval()


class DropsForeignTokens:
    """Stands for a packing hook: in the forward, and only there, keeps a module within documents."""

    def __init__(self, module: nn.Module, lengths: tuple[int, ...]) -> None:
        self.handle = module.register_forward_hook(self)
        self.lengths = lengths

    def __call__(self, module, args, output):
        if output.shape[1] != sum(self.lengths):
            return None
        parts = [module.forward(part) for part in args[0].split(self.lengths, dim=1)]
        return torch.cat(parts, dim=1)


def checkpointed(model: nn.Module, *, use_reentrant: bool) -> nn.Module:
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})
    return model.train()


def with_hook_removed_before_backward(
    lengths: tuple[int, ...], *, use_reentrant: bool
) -> nn.Module:
    """Checkpointed layers whose hooks are put on at each forward and taken off at its end."""
    model = checkpointed(with_norm(CentredByRow), use_reentrant=use_reentrant)
    norm = model.model.layers[1].input_layernorm
    attached = []
    model.register_forward_pre_hook(
        lambda *_: attached.append(DropsForeignTokens(norm, lengths)) or None
    )
    model.register_forward_hook(lambda *_: attached.pop().handle.remove())
    return model
