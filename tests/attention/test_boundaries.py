"""Boundaries that do not fit an attention call are refused before any kernel runs, with their numbers."""

import pytest
import torch

from hf_neat_packing.attention import LazyMask, neat_varlen_attention, neat_varlen_mask
from hf_neat_packing.errors import BoundaryError, UnsupportedAttentionError


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 1


def attend(tokens=12, keys=None, batch=1, mask=None, **kwargs):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 2, tokens, 8, generator=generator, requires_grad=True)
    key = torch.randn(batch, 2, keys or tokens, 8, generator=generator)
    return neat_varlen_attention(Module(), query, key, key, mask, **kwargs)[0]


def offsets(*values, dtype=torch.int32, longest=None):
    tensor = torch.tensor(values, dtype=dtype)
    longest = int(tensor.diff().max()) if longest is None else longest
    return {
        "cu_seq_lens_q": tensor, "cu_seq_lens_k": tensor, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 4, 9), ["ends at 9", "12 tokens", "belong to no document"]),
        ((0, 4, 15), ["ends at 15", "12 tokens", "outside the row"]),
        ((2, 4, 12), ["starts at 2", "[2, 4, 12]"]),
        ((0, 4, 4, 12), ["strictly", "[0, 4, 4, 12]"]),
        ((0, 8, 4, 12), ["strictly"]),
    ],
)
def test_c32_offsets_that_do_not_cover_the_row_are_named(values, words):
    with pytest.raises(BoundaryError) as error:
        attend(**offsets(*values, longest=8))
    assert all(word in str(error.value) for word in words)


def test_a_wrong_longest_length_is_named():
    with pytest.raises(BoundaryError, match=r"max_length_q=5.*8 tokens"):
        attend(**offsets(0, 4, 12, longest=5))


def test_c52_int64_offsets_and_scalar_tensors_are_read():
    wanted = attend(**offsets(0, 4, 12))
    assert torch.equal(wanted, attend(**offsets(0, 4, 12, dtype=torch.int64)))
    assert torch.equal(wanted, attend(**offsets(0, 4, 12, longest=torch.tensor(8))))


@pytest.mark.parametrize(
    "missing", ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
)
def test_half_of_the_varlen_kwargs_is_no_boundary(missing):
    kwargs = offsets(0, 4, 12)
    del kwargs[missing]
    with pytest.raises(BoundaryError, match=missing):
        attend(**kwargs)


def test_offsets_of_queries_and_keys_must_agree():
    kwargs = offsets(0, 4, 12) | {"cu_seq_lens_k": torch.tensor([0, 6, 12], dtype=torch.int32)}
    with pytest.raises(BoundaryError, match="differ"):
        attend(**kwargs)


def test_float_offsets_and_lists_are_refused():
    with pytest.raises(BoundaryError, match="integer"):
        attend(**offsets(0, 4, 12, dtype=torch.float32))
    with pytest.raises(BoundaryError, match="int32 tensors"):
        attend(**offsets(0, 4, 12) | {"cu_seq_lens_q": [0, 4, 12]})


def test_cross_attention_is_refused_and_not_hijacked():
    with pytest.raises(BoundaryError, match="cross-attention"):
        attend(12, keys=20, **offsets(0, 4, 12))


def test_a_map_of_another_shape_is_refused():
    with pytest.raises(BoundaryError, match="document map"):
        attend(_packed_seq_ids=torch.ones(1, 11, dtype=torch.int64))


def test_a_padding_mask_may_mask_whole_segments_only():
    whole = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    half = whole.clone()
    half[0, 2] = False
    kwargs = offsets(0, 4, 8, 12)

    def lazy(padding):
        from transformers.masking_utils import causal_mask_function

        return neat_varlen_mask(
            1, 12, 12, mask_function=causal_mask_function, attention_mask=padding
        )

    assert torch.equal(attend(mask=lazy(whole), **kwargs), attend(**kwargs))
    with pytest.raises(BoundaryError, match="attention_mask"):
        attend(mask=lazy(half), **kwargs)


def test_options_that_cannot_be_honoured_are_refused_by_name():
    with pytest.raises(UnsupportedAttentionError, match="head_mask"):
        attend(head_mask=torch.ones(2))
    with pytest.raises(UnsupportedAttentionError, match="sliding_window=3"):
        attend(is_causal=False, sliding_window=3, **offsets(0, 4, 12))
    with pytest.raises(UnsupportedAttentionError, match="attention_mask"):
        attend(mask=torch.ones(1, 12), **offsets(0, 4, 12))


def test_a_window_that_comes_without_a_mask_is_kept():
    windowed = attend(sliding_window=2, **offsets(0, 4, 12))
    assert not torch.equal(windowed, attend(**offsets(0, 4, 12)))
    shifted = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril().triu(-1)
    assert torch.allclose(windowed, attend(mask=shifted, **offsets(0, 4, 12)), atol=1e-6)


def test_a_dense_mask_beside_boundaries_is_cut_to_the_documents():
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    both_ways = attend(mask=everything, **offsets(0, 4, 12))
    assert torch.allclose(both_ways, attend(is_causal=False, **offsets(0, 4, 12)), atol=1e-6)
    additive = torch.zeros(1, 1, 12, 12)
    assert torch.allclose(both_ways, attend(mask=additive, **offsets(0, 4, 12)), atol=1e-6)


def test_a_position_bias_is_added_inside_documents():
    distance = torch.arange(12)[None, :] - torch.arange(12)[:, None]
    bias = (-0.3 * distance.abs().float())[None, None].expand(1, 2, 12, 12).contiguous()
    packed = attend(position_bias=bias, **offsets(0, 4, 12))
    first = neat_varlen_attention(
        Module(), *(x[:, :, :4] for x in _inputs()), None, position_bias=bias[..., :4, :4]
    )[0]
    assert torch.allclose(packed[:, :4], first, atol=1e-6)
    assert not torch.allclose(packed, attend(**offsets(0, 4, 12)))


def _inputs():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 12, 8, generator=generator)
    key = torch.randn(1, 2, 12, 8, generator=generator)
    return query, key, key


def test_the_lazy_mask_becomes_the_real_one_for_whoever_computes_with_it():
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    function = sliding_window_causal_mask_function(3)
    lazy = neat_varlen_mask(2, 6, 6, mask_function=function, local_size=3)
    dense = sdpa_mask(2, 6, 6, mask_function=function, local_size=3)
    assert isinstance(lazy, LazyMask)
    assert (lazy.shape, lazy.dtype, lazy.device) == (dense.shape, dense.dtype, dense.device)
    assert isinstance(lazy[:, :, :, :6], LazyMask)
    assert torch.equal(lazy[:, :, :4], dense[:, :, :4])
    assert torch.equal(~lazy, ~dense)
    assert torch.equal(torch.where(lazy, 1.0, 0.0), dense.float())
    assert torch.equal(lazy.to(torch.float32), dense.float())
    assert "left=2" in repr(lazy)


@pytest.mark.parametrize("start", [0, 3, 6, 8])
def test_a_block_of_the_lazy_mask_is_the_block_of_the_dense_one(start):
    from transformers.masking_utils import causal_mask_function, or_masks

    groups = torch.tensor([[-1, 0, 0, -1, 1, 1], [-1, -1, 2, 2, 2, -1]])

    def images(batch, head, query, key):
        return (groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0)

    lazy = neat_varlen_mask(
        2, 6, 6, mask_function=or_masks(causal_mask_function, images), use_vmap=True,
        allow_is_causal_skip=False,
    )  # fmt: skip
    assert lazy.recipe.pattern is None, "a custom overlay must be evaluated, not read"
    row, first = divmod(start, 6)
    dense = lazy.recipe.dense()[row : row + 1, :, first : first + 3, first : first + 3]
    assert torch.equal(lazy.recipe.block(start, start + dense.shape[2]), dense)


def test_c11_image_groups_that_touch_stay_in_their_documents():
    """Documents [0, 0, 1, 1] and [1, 1, 0]: the image runs would merge into one group."""
    from transformers.masking_utils import causal_mask_function, or_masks

    group = torch.tensor([-1, -1, 0, 0, 0, 0, -1])

    def images(batch, head, query, key):
        return (group[query] == group[key]) & (group[query] >= 0)

    lazy = neat_varlen_mask(
        1, 7, 7, mask_function=or_masks(causal_mask_function, images), use_vmap=True,
        allow_is_causal_skip=False,
    )  # fmt: skip
    values = torch.eye(7)[None, None]
    zeros = torch.zeros(1, 1, 7, 7)
    output = neat_varlen_attention(Module(), zeros, zeros, values, lazy, **offsets(0, 4, 7))[0]
    seen = [row.nonzero().squeeze(1).tolist() for row in output[0, :, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [4, 5], [4, 5], [4, 5, 6]]


def test_keys_that_an_indexer_chose_are_kept_inside_documents():
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(12, generator=generator)[:5] for _ in range(12)])[None]
    chosen[..., 0] = torch.arange(12)  # every query may see itself
    kept = torch.zeros(1, 12, 12, dtype=torch.bool).scatter_(-1, chosen, True)[:, None]
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    packed = attend(indices=chosen, **offsets(0, 4, 12))
    assert torch.allclose(packed, attend(mask=kept & causal, **offsets(0, 4, 12)), atol=1e-6)
    assert not torch.allclose(packed, attend(**offsets(0, 4, 12)), atol=1e-3)
    unpacked = attend(indices=chosen)
    assert torch.allclose(unpacked, attend(mask=kept & causal), atol=1e-6)


def test_a_sink_for_every_query_takes_its_share():
    sinks = torch.randn(1, 2, 12, 1, generator=torch.Generator().manual_seed(4))
    packed = attend(sinks=sinks, **offsets(0, 4, 12))
    assert not torch.allclose(packed, attend(**offsets(0, 4, 12)), atol=1e-3)
    for start, stop in ((0, 4), (4, 12)):
        piece = [x[:, :, start:stop] for x in _inputs()]
        alone = neat_varlen_attention(Module(), *piece, None, sinks=sinks[:, :, start:stop])[0]
        assert torch.allclose(packed[:, start:stop], alone, atol=1e-6)
    same = sinks[:, :, :1].expand(-1, -1, 12, -1)
    per_head = attend(s_aux=sinks[0, :, 0, 0], **offsets(0, 4, 12))
    assert torch.allclose(attend(sinks=same, **offsets(0, 4, 12)), per_head, atol=1e-6)


def test_a_model_that_adds_the_mask_to_its_scores_gets_the_additive_one():
    from transformers.masking_utils import causal_mask_function, eager_mask

    lazy = neat_varlen_mask(1, 6, 6, mask_function=causal_mask_function)
    scores = torch.randn(1, 2, 6, 6)
    wanted = scores + eager_mask(
        1, 6, 6, mask_function=causal_mask_function, allow_is_causal_skip=False
    )
    assert torch.equal(scores + lazy, wanted)
    assert torch.equal(lazy + scores, wanted)
