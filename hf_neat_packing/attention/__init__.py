"""The attention key `neat_varlen`: registered with transformers, attention and mask together.

`neat_varlen` takes the best kernel for each call. `neat_varlen:<kernel>` is the same attention with
one kernel that is never replaced, e.g. `neat_varlen:sdpa`.
"""

from functools import partial

from .._compat import register_attention, registered_attention, registered_mask
from ..errors import ContractError
from .forward import neat_varlen_attention
from .kernels import KERNELS
from .mask_entry import LazyMask, neat_varlen_mask

__all__ = ["ATTENTION_KEY", "LazyMask", "neat_varlen_attention", "neat_varlen_mask", "register"]

ATTENTION_KEY = "neat_varlen"


def register() -> None:
    """Register `neat_varlen` and its mask entry with transformers; twice does no harm.

    `import hf_neat_packing` calls it. Without it, `from_pretrained(..., attn_implementation=
    "neat_varlen")` raises a `ValueError` that does not say which package to import.

    Raises:
        ContractError: another package has registered the key.
    """
    keys = {ATTENTION_KEY: "auto"} | {f"{ATTENTION_KEY}:{name}": name for name in KERNELS}
    for key, kernel in keys.items():
        if registered_mask(key) is neat_varlen_mask:
            continue
        if registered_attention(key) is not None or registered_mask(key) is not None:
            raise ContractError(
                f"The attention key {key!r} is already registered by other code "
                f"({registered_attention(key)}). Two implementations cannot share one key: remove the other "
                "registration before importing hf_neat_packing."
            )
        attention = (
            neat_varlen_attention
            if kernel == "auto"
            else partial(neat_varlen_attention, kernel=kernel)
        )
        register_attention(key, attention, neat_varlen_mask)
