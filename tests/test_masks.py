"""4-D masks against a second, independent formula: transformers' own mask builder from packed positions."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS
from transformers.masking_utils import create_masks_for_generate

from hf_neat_packing.contract import LayerMask, PackingCapabilities
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.errors import BoundaryError
from hf_neat_packing.masks import additive, block_mask, flex_block_mask, masks_for

FULL = LayerMask()


def sliding(size):
    return LayerMask("sliding_attention", "sliding", size)


def chunked(size):
    return LayerMask("chunked_attention", "chunked", size)


def from_transformers(name, lengths, key="sdpa"):
    """Masks that transformers builds for packed positions without a cache."""
    config = CONFIGS[name]()
    config._attn_implementation = key
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    embeds = torch.zeros(1, sum(lengths), config.hidden_size)
    return create_masks_for_generate(config, embeds, None, None, position_ids=positions)


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_masks_of_mixed_layers_equal_the_librarys(name):
    lengths = [6, 7, 1]
    size = {"gemma3": 4, "llama4": 4}[name]
    theirs = from_transformers(name, lengths)
    ours = {
        "full_attention": block_mask(lengths_to_document_map([lengths])),
        "sliding_attention": block_mask(lengths_to_document_map([lengths]), sliding(size)),
        "chunked_attention": block_mask(lengths_to_document_map([lengths]), chunked(size)),
    }
    assert theirs
    for layer_type, mask in theirs.items():
        assert torch.equal(ours[layer_type], mask)


@pytest.mark.parametrize(("name", "pattern"), [("llama", FULL), ("mistral", sliding(4))])
def test_the_mask_of_uniform_layers_equals_the_librarys(name, pattern):
    lengths = [6, 7, 1, 1]
    ours = block_mask(lengths_to_document_map([lengths]), pattern)
    assert torch.equal(ours, from_transformers(name, lengths))
    eager = from_transformers(name, lengths, "eager")
    assert torch.equal(additive(ours, torch.float32), eager)


def test_c45_a_window_has_exactly_the_pairs_of_its_documents():
    mask = block_mask(lengths_to_document_map([[6, 7]]), sliding(4))[0, 0]
    assert mask[5].nonzero().squeeze(1).tolist() == [2, 3, 4, 5]
    assert mask[9].nonzero().squeeze(1).tolist() == [6, 7, 8, 9]
    assert mask[12].nonzero().squeeze(1).tolist() == [9, 10, 11, 12]
    assert int(mask.sum()) == 40


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 4),
    st.sampled_from([FULL, sliding(1), sliding(3), chunked(3)]),
    st.booleans(),
)
def test_no_pair_crosses_a_document_and_no_document_sees_padding(rows, tail, pattern, causal):
    width = max(map(sum, rows)) + tail
    ids = lengths_to_document_map(rows, row_length=width)
    mask = block_mask(ids, pattern, is_causal=causal)
    assert mask.shape == (len(rows), 1, width, width)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    real = (ids != 0)[:, None, :, None]
    assert not (mask & ~same).any()
    assert not (mask & ~real & ~torch.eye(width, dtype=torch.bool)).any()
    assert mask.diagonal(dim1=2, dim2=3).all(), "every token sees itself, so no softmax is empty"
    if causal:
        assert not mask.triu(1).any()
    if pattern is FULL:
        expected = same & real
        expected = expected.tril() if causal else expected
        assert torch.equal(mask & real, expected)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from([FULL, sliding(5), chunked(7)]),
    st.booleans(),
)
def test_the_flex_mask_allows_the_same_pairs(lengths, pattern, causal):
    ids = lengths_to_document_map([lengths], row_length=sum(lengths) + 3)
    allowed = flex_block_mask(ids, pattern, is_causal=causal).mask_mod
    index = torch.arange(ids.shape[1])
    dense = allowed(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(dense, block_mask(ids, pattern, is_causal=causal)[0, 0])


def test_additive_masks_are_finite_and_in_the_dtype_of_the_scores():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = additive(block_mask(torch.tensor([[1, 1, 2, 0]])), dtype)
        assert mask.dtype == dtype
        assert mask.isfinite().all()
        assert set(mask.unique().tolist()) == {torch.finfo(dtype).min, 0.0}


def test_an_invalid_map_makes_no_mask():
    for bad in ([[1, 2, 1]], [[1, -1, 1]]):
        with pytest.raises(BoundaryError):
            block_mask(torch.tensor(bad))
        with pytest.raises(BoundaryError):
            flex_block_mask(torch.tensor(bad))


def test_masks_are_shared_by_layer_types_of_one_pattern_and_absent_for_recurrent_layers():
    capabilities = PackingCapabilities(
        "block_causal",
        layer_masks=(
            FULL,
            LayerMask("other_attention"),
            sliding(3),
            LayerMask("conv", "recurrent"),
        ),
        mask_delivery="dict",
    )
    masks = masks_for(torch.tensor([[1, 1, 1, 1, 2]]), capabilities)
    assert masks["conv"] is None
    assert masks["full_attention"] is masks["other_attention"]
    assert not torch.equal(masks["full_attention"], masks["sliding_attention"])


def test_c54_a_long_row_warns_with_its_bytes_and_names_the_way_out():
    capabilities = PackingCapabilities("block_causal", attention_key="sdpa")
    ids = lengths_to_document_map([[4100, 4100]])
    with pytest.warns(UserWarning, match=r"8200 tokens.*67,240,000 bytes.*neat_varlen"):
        masks_for(ids, capabilities)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks_for(lengths_to_document_map([[40, 40]]), capabilities)
