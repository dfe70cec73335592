"""What boundaries and the tokens of an attention call must agree on, in eager and in compiled calls.

Legend: `N` documents.
"""

from torch import Tensor

from ..errors import BoundaryError
from ..offsets import INT32_MAX


def check_same_tokens(query: Tensor, key: Tensor) -> None:
    """Refuse an attention whose keys are not the tokens of its queries.

    Raises:
        BoundaryError: cross-attention, or a cache that holds tokens.
    """
    if query.shape[0] * query.shape[2] != key.shape[0] * key.shape[2]:
        raise BoundaryError(
            f"The varlen kwargs reached an attention of {query.shape[2]} queries over {key.shape[2]} keys per row: "
            "cross-attention, or a cache that already holds tokens. The boundaries of one packed row do not describe "
            "it. Pass use_cache=False for packed rows; encoder-decoder models cannot take packed rows here."
        )


def check_same_shape(cu_q: Tensor, cu_k: Tensor) -> None:
    """Refuse offsets of queries and keys that cannot be the same.

    Raises:
        BoundaryError: of other shapes, or no integers.
    """
    if cu_q.is_floating_point() or cu_q.shape != cu_k.shape:
        raise BoundaryError(
            f"cu_seq_lens_q and cu_seq_lens_k must be equal 1-D integer tensors of two or more offsets, got "
            f"{list(cu_q.shape)} {cu_q.dtype} and {list(cu_k.shape)} {cu_k.dtype}."
        )


def describes(cu_seqlens: Tensor, num_tokens: int, longest: int) -> Tensor:
    """Whether offsets describe the tokens of a call, without reading them: a bool on their device.

    Args:
        cu_seqlens: integer `[N+1]`; its end may be padded with repetitions of the last offset.
        num_tokens: tokens of the flattened rows.
        longest: what the call says of the longest document.
    """
    lengths = cu_seqlens.diff()
    rises = ((lengths > 0) | (cu_seqlens[1:] == num_tokens)) & (lengths <= longest)
    return (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & rises.all()


def check_padding_mask(attention_mask: Tensor, lengths: list[int]) -> None:
    """A 2-D mask beside boundaries may only mask whole segments, such as the padding tail."""
    pieces = (
        attention_mask.reshape(-1).cpu().split(lengths)
        if attention_mask.numel() == sum(lengths)
        else ()
    )
    for number, piece in enumerate(pieces):
        if bool(piece.any()) != bool(piece.all()):
            raise BoundaryError(
                f"`attention_mask` masks {int((~piece).sum())} of the {piece.numel()} tokens of segment {number}, "
                "while the varlen kwargs call them one document. One of the two is wrong. Send no attention_mask "
                "beside varlen kwargs, and give padding a segment of its own."
            )


def check_int32_rule(num_tokens: int, num_documents: int, query: Tensor) -> None:
    """Varlen kernels index `(tokens + 128 * documents) * heads * ceil32(dim)` in int32."""
    padded_dim = -(-query.shape[-1] // 32) * 32
    elements = (num_tokens + 128 * num_documents) * query.shape[1] * padded_dim
    if query.device.type == "cuda" and elements > INT32_MAX:
        raise BoundaryError(
            f"{num_tokens} tokens in {num_documents} documents with {query.shape[1]} heads of {query.shape[-1]} need "
            f"{elements} addresses, more than the {INT32_MAX} that int32 kernels reach: they would read "
            "the wrong memory. Use a smaller max_length or fewer rows per batch."
        )
