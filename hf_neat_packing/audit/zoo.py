"""Tiny models of every type: its own config shrunk, weights large enough that a leak shows.

No network, no downloads: configs are made by their classes, weights are drawn from a seed.
"""

import zlib
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import UnsupportedModelError
from .own_tables import reason_of_own_table
from .zoo_configs import tiny_config
from .zoo_sizes import ENCODER_EXCEPTIONS

ENCODERS: Final = tuple(
    f"{name}:masked"
    for name in (
        *("albert", "bert", "camembert", "distilbert", "electra", "esm", "eurobert", "ibert"),
        *("modernbert", "mpnet", "nomic_bert", "roberta", "roc_bert", "xlm-roberta"),
    )
)
"""Bidirectional models of the zoo: masked language models, `<model type>:masked`."""

_SCALE = 0.25
_EMBEDDING_SCALE = 0.5
_NOISE = 0.1
_LONGEST_KERNEL = 8


def model_types() -> tuple[str, ...]:
    """List every causal-LM type of transformers' auto mapping, then the encoders."""
    return (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODERS)


def model_class_name(model_type: str) -> str:
    """Name the class that a type of the zoo is built as."""
    base, _, task = model_type.partition(":")
    if task:
        return f"{base} ({task} language model)"
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base, base))


def tiny_model(
    model_type: str,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Build a tiny model of a type with large random weights, dropout 0, in eval mode.

    Hidden size 64, 4 heads, 128 token ids, at least one layer of each kind, windows and chunks of 4
    tokens. Equal arguments give equal weights, in every dtype and for every attention.

    Args:
        model_type: one of `model_types()`.
        attn_implementation: attention key; default: the model's own choice.
        dtype: floating dtype of the parameters.
        seed: of the weights.

    Raises:
        UnsupportedModelError: an unknown type, or one that cannot be built, with the reason.
    """
    if model_type not in model_types():
        raise UnsupportedModelError(
            f"{model_type!r} is no type of the installed transformers {transformers.__version__}. "
            "`hf_neat_packing.audit.zoo.model_types()` lists them."
        )
    # Some models draw tables of their own when they are built; the caller's random state is kept.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = _build(model_type, attn_implementation, dtype)
        except Exception as error:
            raise UnsupportedModelError(
                f"{model_type} cannot be built with attention {attn_implementation or 'default'}: "
                f"{_reason(error, model_type, attn_implementation)}"
            ) from error
    model = model.float()
    redraw_weights(model, seed=seed)
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # where the config does not say it
    return model.eval()


def _reason(error: Exception, model_type: str, attention: str | None) -> str:
    if attention is not None and isinstance(error, KeyError) and error.args == (attention,):
        return reason_of_own_table(model_class_name(model_type), attention)
    return f"{type(error).__name__}: {error}"


def _build(model_type: str, attention: str | None, dtype: torch.dtype) -> nn.Module:
    base, _, task = model_type.partition(":")
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if dtype == torch.float64:
        # Grouped matrix products of experts have no float64 kernel.
        options["experts_implementation"] = "eager"
    if task:
        config = tiny_config(base, ENCODER_EXCEPTIONS.get(base, {}))
        return AutoModelForMaskedLM.from_config(config, **options)  # type: ignore[no-any-return]
    config = tiny_config(base)
    if config.model_type == base:
        try:
            return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-any-return]
        except ValueError:
            if options.pop("experts_implementation", None) is None:
                raise
            config = tiny_config(base)
            return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-any-return]
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base])
    return cls(tiny_config(base, **options))  # type: ignore[no-any-return]


def redraw_weights(model: nn.Module, *, seed: int = 0) -> None:
    """Draw all weights anew, large, so that what one document does to another is far above rounding.

    Matrices get standard deviation 0.25, embeddings and convolution kernels 0.5; vectors (norms,
    biases, decays) keep their values plus noise of 0.1. Each parameter has a stream of its own, by
    name. Fixed tables (no gradient) stay.

    Args:
        model: changed in place.
        seed: of all streams.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # blt freezes its patcher, which holds weights, not a table.
            if not parameter.requires_grad and "patcher" not in name:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            kernel = parameter.ndim >= 3 and parameter.shape[-1] <= _LONGEST_KERNEL
            if kernel or (parameter.ndim >= 2 and "embed" in name):
                drawn *= _EMBEDDING_SCALE
            elif parameter.ndim >= 2:
                drawn *= _SCALE
            else:
                kept = parameter.detach().double()
                drawn = torch.nan_to_num(kept, posinf=0.0, neginf=0.0) + _NOISE * drawn
            parameter.copy_(drawn)
