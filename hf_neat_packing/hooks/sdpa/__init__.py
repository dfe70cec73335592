"""Packed rows for models whose attention only reaches `scaled_dot_product_attention`."""

from .api import (
    attach_cp1_packed_varlen_hooks,
    configure_cp_varlen,
    cp1_packed_varlen_backend,
    detach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
    pack_sdpa_only_model,
)
from .attachment import SdpaHooksHandle

__all__ = [
    "SdpaHooksHandle",
    "attach_cp1_packed_varlen_hooks",
    "configure_cp_varlen",
    "cp1_packed_varlen_backend",
    "detach_cp1_packed_varlen_hooks",
    "disable_cp1_packed_varlen",
    "enable_cp1_packed_varlen",
    "pack_sdpa_only_model",
]
