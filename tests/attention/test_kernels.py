"""Every kernel against the float64 oracle, values and gradients, and the choice among them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.attention.kernels import (
    KERNELS,
    VarlenCall,
    choose_kernel,
    flash,
    reference,
    run,
    torch_varlen,
)
from hf_neat_packing.attention.kernels.buckets import CALL_OVERHEAD, share_calls
from hf_neat_packing.errors import UnsupportedAttentionError

WINDOWS = [(None, 0), (None, None), (3, 0), (20, 0), (0, 0), (5, 5), (40, 40)]


def make_call(lengths, *, heads=(4, 2), dims=(8, 8), dtype=torch.float64, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def draw(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    return VarlenCall(
        query=draw(total, heads[0], dims[0]),
        key=draw(total, heads[1], dims[0]),
        value=draw(total, heads[1], dims[1]),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        **options,
    )


def values_and_gradients(function, call):
    inputs = [call.query, call.key, call.value]
    inputs += [] if call.sinks is None else [call.sinks]
    output = function(call)
    upstream = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    return [output, *torch.autograd.grad(output, inputs, upstream.to(output.dtype))]


def assert_like_the_oracle(call, name):
    """float64 against float64: only the order of additions may differ."""
    longest = max(call.lengths)
    for ours, theirs in zip(
        values_and_gradients(KERNELS[name][0], call),
        values_and_gradients(reference.attention, call),
        strict=True,
    ):
        bound = (
            32
            * longest
            * torch.finfo(torch.float64).eps
            * max(1.0, float(theirs.detach().abs().max()))
        )
        assert float((ours - theirs).detach().abs().max()) <= bound


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["sdpa", "explicit"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [1, 1, 1], [7, 1, 12, 5, 9], [300, 2, 300], [513], [600, 1, 30, 30, 31, 257, 256]],
)
def test_kernels_equal_the_oracle(name, lengths, window):
    assert_like_the_oracle(make_call(lengths, left=window[0], right=window[1]), name)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("dims", [(8, 4), (4, 8), (5, 3)])
@pytest.mark.parametrize("name", ["sdpa", "explicit"])
def test_grouped_heads_and_unequal_head_dims(name, heads, dims):
    assert_like_the_oracle(make_call([9, 300, 2], heads=heads, dims=dims), name)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_explicit_kernel_computes_softcap_and_sinks(softcap, sinks):
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    call = make_call([7, 1, 600], softcap=softcap, sinks=sink, scale=0.7, left=200, right=0)
    assert_like_the_oracle(call, "explicit")
    if softcap or sinks:
        plain = reference.attention(call._replace(softcap=None, sinks=None))
        assert not torch.allclose(plain, reference.attention(call))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from(WINDOWS),
    st.sampled_from([(4, 2), (2, 2)]),
)
def test_any_cut_of_a_row_equals_the_oracle(lengths, window, heads):
    assert_like_the_oracle(make_call(lengths, heads=heads, left=window[0], right=window[1]), "sdpa")


def test_a_mask_of_its_own_is_kept_inside_documents():
    allowed = torch.rand(20, 20, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed |= torch.eye(20, dtype=torch.bool)
    call = make_call([8, 12], right=None, mask=lambda a, b: allowed[None, None, a:b, a:b])
    for name in ("sdpa", "explicit"):
        assert_like_the_oracle(call, name)
    additive = torch.zeros(20, 20, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    biased = call._replace(mask=lambda a, b: additive[None, None, a:b, a:b])
    assert torch.equal(run(biased, "sdpa"), run(call, "sdpa"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_and_single_precision_stay_within_their_own_rounding(dtype):
    call = make_call([7, 100, 300], dtype=dtype, dims=(64, 64))
    truth = reference.attention(call)
    one_call_each = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None].repeat_interleave(2, 1),
                v.transpose(0, 1)[None].repeat_interleave(2, 1),
                is_causal=True,
            )[0].transpose(0, 1)
            for q, k, v in zip(*(x.split([7, 100, 300]) for x in call[:3]), strict=True)
        ]
    )
    allowed = 2 * (one_call_each - truth).norm()
    assert (run(call) - truth).norm() <= allowed
    leaky = call._replace(lengths=(107, 300))
    assert (run(leaky) - truth).norm() > 10 * allowed


def test_dropout_drops_weights_and_scales_the_rest():
    call = make_call([400], heads=(2, 2), dtype=torch.float32, dropout=0.5)
    for name in ("sdpa", "explicit"):
        torch.manual_seed(0)
        first = run(call, name)
        assert not torch.equal(first, run(call, name))
        torch.manual_seed(0)
        assert torch.equal(first, run(call, name))
        truth = reference.attention(call)
        # The mean over many draws approaches the undropped value: kept weights are scaled up.
        mean = torch.stack([run(call, name).detach() for _ in range(200)]).mean(0)
        late = slice(100, None)  # early queries have few weights to drop
        assert (mean - truth)[late].abs().mean() < 0.2 * truth[late].abs().mean()


def test_an_explicit_kernel_never_falls_back():
    call = make_call([3, 4], softcap=1.0)
    with pytest.raises(UnsupportedAttentionError, match="softcap"):
        choose_kernel(call, "sdpa")
    with pytest.raises(UnsupportedAttentionError, match="CUDA"):
        choose_kernel(call._replace(softcap=None), "torch_varlen")
    with pytest.raises(UnsupportedAttentionError, match="auto, fa"):
        choose_kernel(call, "bogus")


def test_the_choice_says_why():
    choice = choose_kernel(make_call([3, 4], softcap=1.0))
    assert choice.name == "explicit"
    assert any(line.startswith("sdpa: ") and "softcap" in line for line in choice.trace)
    assert choice.trace[-1] == "explicit: taken"


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.sampled_from([1, 8, 64]))
def test_every_short_token_has_exactly_one_real_slot(lengths, heads):
    plan = share_calls(tuple(lengths), heads)
    in_buckets = [n for bucket in plan.buckets for n in bucket.documents]
    assert sorted([*plan.alone, *in_buckets]) == list(range(len(lengths)))
    assert sum(tokens for tokens, _ in plan.stretches) == sum(lengths)
    assert torch.equal(plan.source[plan.slot], torch.arange(plan.slot.numel()))
    for bucket in plan.buckets:
        wasted = sum(bucket.width**2 - lengths[n] ** 2 for n in bucket.documents)
        assert wasted <= CALL_OVERHEAD // heads
        assert all(lengths[n] <= bucket.width for n in bucket.documents)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["torch_varlen", "fa"])
def test_gpu_kernels_stay_within_half_precision_of_the_oracle(name):
    call = make_call([7, 100, 300], dtype=torch.bfloat16, dims=(64, 64))
    call = call._replace(
        lengths=None,
        **{n: getattr(call, n).detach().cuda() for n in ("query", "key", "value", "cu_seqlens")},
    )
    if KERNELS[name][1](call) is not None:
        pytest.skip(str(KERNELS[name][1](call)))
    truth = reference.attention(call)
    allowed = 2 * (run(call, "sdpa") - truth).norm()
    assert (run(call, name) - truth).norm() <= allowed


@pytest.mark.parametrize("dims", [(8, 4), (5, 3), (4, 8)])
@pytest.mark.parametrize("window", [(None, 0), (3, 0), (None, None)])
def test_the_cuda_kernels_hand_over_what_was_asked_for(monkeypatch, dims, window):
    """Stand-ins with the documented signatures compute the oracle from what they are given."""
    call = make_call([5, 9], dims=dims, left=window[0], right=window[1])

    def oracle(q, k, v, cu, longest, scale, window_size):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        left, right = (None if reach == -1 else reach for reach in window_size)
        return reference.attention(VarlenCall(q, k, v, cu, longest, None, left, right, scale))

    def torch_op(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert enable_gqa == grouped
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return oracle(q, k, v, cu_q, max_q, scale, window_size)

    def flash_attn(
        q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size, dropout_p, softcap
    ):
        assert causal == (window_size[1] == 0)
        return oracle(q, k, v, cu_q, max_q, softmax_scale, window_size)

    monkeypatch.setattr(torch_varlen, "torch_varlen_attention", lambda: torch_op)
    monkeypatch.setattr(torch_varlen, "torch_varlen_groups_heads", lambda: grouped)
    monkeypatch.setattr(flash, "_function", lambda: flash_attn)
    truth = reference.attention(call)
    grouped = True
    assert torch.allclose(torch_varlen.attention(call), truth, atol=1e-12)
    grouped = False
    assert torch.allclose(torch_varlen.attention(call), truth, atol=1e-12)
    assert torch.allclose(flash.attention(call), truth, atol=1e-12)
