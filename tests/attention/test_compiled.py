"""torch.compile and torch.export: whole graphs, few of them, and the numbers of the eager code."""

import shutil

import pytest
import torch
from exactness import gradient_leaks, leaking_documents, packed_inputs
from tiny_models import ENCODERS, random_ids, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.attention import operator, traced
from hf_neat_packing.attention.inside import NO_INTERVAL, interval_of
from hf_neat_packing.attention.kernels import half_precision, sdpa, torch_varlen
from hf_neat_packing.attention.kernels.call import VarlenCall
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.errors import UnsupportedAttentionError

LENGTHS = [3, 5, 1, 7]


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend="eager", *, dynamic=True):
    """Compile a model in one piece; `eager` records the graph and runs it as it is."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic), counter


def build(name, key="neat_varlen", dtype=torch.float32):
    model = tiny_model(name, key, dtype)
    if name in ("mixtral", "gpt_oss"):
        # The eager loop over experts depends on data by itself.
        model.set_experts_implementation("grouped_mm")
    return model


def inputs(name, lengths, seed=0):
    ids = random_ids(lengths, seed)
    cache = {} if name in ENCODERS else {"use_cache": False}
    return {"input_ids": ids, "labels": ids, **packed_inputs(lengths), **cache}


def gradients(model, run, batch):
    model.zero_grad()
    run(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def random_lengths(generator, longest=12):
    count = int(torch.randint(2, 9, (1,), generator=generator))
    return torch.randint(1, longest, (count,), generator=generator).tolist()


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2)])
def test_fifty_packs_of_other_counts_and_lengths_need_one_or_two_graphs(dynamic, graphs):
    """By default torch takes the first pack's sizes for fixed, and what differs in the second for free."""
    model = build("llama")
    run, counter = compiled(model, dynamic=dynamic)
    generator = torch.Generator().manual_seed(3)
    packs = [[3, 4], [2, 5, 9], *(random_lengths(generator) for _ in range(48))]
    with torch.no_grad():
        for number, lengths in enumerate(packs):
            batch = inputs("llama", lengths, number)
            assert torch.equal(run(**batch).logits, model(**batch).logits), number
    assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("name", "backend"),
    [("gemma3", "aot_eager"), ("gpt_oss", "eager"), ("llama4", "eager"), ("modernbert", "eager")],
)
def test_a_whole_graph_gives_the_gradients_of_the_eager_code(name, backend):
    """Windows, sinks, experts, chunks, both directions; what the graph's backward makes of them."""
    model = build(name)
    run, _ = compiled(model, backend)
    batch = inputs(name, LENGTHS)
    theirs = gradients(model, model, batch)

    def same(ours):
        assert ours.keys() == theirs.keys()
        scale = {k: theirs[k].abs().max().clamp_min(1e-6) for k in theirs}
        return all((ours[k] - theirs[k]).abs().max() <= 1e-5 * scale[k] for k in ours)

    assert same(gradients(model, run, batch))
    other = packed_inputs([*LENGTHS[:2], *reversed(LENGTHS[2:])])
    assert not same(gradients(model, run, batch | other)), "the control has the same gradients"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_documents_stay_apart_in_the_graph_and_mix_without_boundaries(name):
    model = build(name)
    run, _ = compiled(model)
    ids = random_ids(LENGTHS)
    packed = packed_inputs(LENGTHS) | {"use_cache": False}
    assert leaking_documents(lambda x: run(input_ids=x, **packed).logits, ids, LENGTHS) == []
    assert gradient_leaks(run, packed, ids, LENGTHS) == []
    assert leaking_documents(lambda x: run(input_ids=x, use_cache=False).logits, ids, LENGTHS)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_training_step_in_one_piece():
    model = build("llama")
    run, _ = compiled(model, "inductor")
    batch = inputs("llama", LENGTHS)
    ours, theirs = gradients(model, run, batch), gradients(model, model, batch)
    for parameter, gradient in ours.items():
        scale = theirs[parameter].abs().max().clamp_min(1e-6)
        assert (gradient - theirs[parameter]).abs().max() <= 1e-4 * scale, parameter


@pytest.mark.parametrize("max_documents", [8, None])
def test_offsets_of_a_fixed_size_need_one_graph(max_documents):
    model = build("llama")
    run, counter = compiled(model, dynamic=None)
    collator = DataCollatorForNeatPacking(model, row_length=40, max_documents=max_documents)
    generator = torch.Generator().manual_seed(4)
    for number in range(6):
        lengths = random_lengths(generator, longest=6)
        pieces = random_ids(lengths, number)[0].split(lengths)
        batch = collator([[{"input_ids": piece.tolist()} for piece in pieces]])
        with torch.no_grad():
            assert torch.equal(run(**batch, use_cache=False).logits, model(**batch).logits)
    assert counter.frame_count == (1 if max_documents else 2)


def test_a_compiled_layer_reads_the_mask_that_was_described_outside():
    model = build("gemma3")
    batch = inputs("gemma3", LENGTHS)
    expected = model(**batch).logits
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    assert torch.equal(model(**batch).logits, expected)


def test_the_document_map_alone_is_enough():
    model = build("llama")
    run, _ = compiled(model)
    batch = inputs("llama", LENGTHS)
    bare = {k: v for k, v in batch.items() if not k.startswith(("cu_", "max_"))}
    bare["_packed_seq_ids"] = lengths_to_document_map([LENGTHS])
    assert torch.equal(run(**bare).logits, model(**batch).logits)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_exact_for_other_packs(strict):
    class Packed(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, positions, offsets):
            return self.model(
                input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=offsets,
                cu_seq_lens_k=offsets, max_length_q=64, max_length_k=64,
            ).logits  # fmt: skip

    def arguments(lengths):
        packed = packed_inputs(lengths)
        return random_ids(lengths, 5), packed["position_ids"], packed["cu_seq_lens_q"]

    model = build("gemma3")
    tokens, offsets = torch.export.Dim("tokens", min=3, max=64), torch.export.Dim("offsets", min=3)
    shapes = ({1: tokens}, {1: tokens}, {0: offsets})
    program = torch.export.export(
        Packed(model), arguments(LENGTHS), dynamic_shapes=shapes, strict=strict
    )
    other = [4, 4, 9, 1, 2]
    expected = Packed(model)(*arguments(other))
    assert torch.equal(program.module()(*arguments(other)), expected)
    ids, positions, _ = arguments(other)
    wrong = program.module()(ids, positions, arguments([4, 8, 8])[2])
    assert not torch.equal(wrong, expected)


def test_wrong_offsets_are_refused_when_the_graph_runs():
    run, _ = compiled(build("llama"))
    batch = inputs("llama", LENGTHS)
    short = packed_inputs(LENGTHS[:-1])
    batch |= {"cu_seq_lens_q": short["cu_seq_lens_q"], "cu_seq_lens_k": short["cu_seq_lens_k"]}
    with pytest.raises(ValueError, match="the call holds 16 tokens"):
        run(**batch)


def qkv(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, sum(lengths), 8), (1, 2, sum(lengths), 8), (1, 2, sum(lengths), 6))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def call_operator(tensors, lengths, *, interval=None, seed=None, dropout=0.0, **given):
    cu = packed_inputs(lengths)["cu_seq_lens_q"]
    arguments = (
        *tensors, cu, None, interval, given.get("dense"), given.get("bias"), given.get("sinks"), None,
        seed, None, 0, None, None, dropout, given.get("softcap"), "auto",
    )  # fmt: skip
    return arguments


@pytest.mark.parametrize("extra", ["plain", "bias", "sinks"])
def test_the_operator_keeps_the_rules_of_torch(extra):
    tensors = qkv(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    given = {
        "plain": {},
        "bias": {"bias": torch.randn(1, 4, 16, 16, generator=generator, dtype=torch.float64)},
        "sinks": {"sinks": torch.randn(4, generator=generator, dtype=torch.float64)},
    }[extra]
    given = {name: value.requires_grad_() for name, value in given.items()}
    torch.library.opcheck(operator.packed_attention, call_operator(tensors, LENGTHS, **given))


def test_the_backward_drops_the_weights_that_the_forward_dropped():
    """The output is linear in the value, so <dvalue, value> equals <gradient, output>."""
    tensors = qkv(LENGTHS)
    seed = torch.tensor([7])
    gradient = torch.randn(1, 16, 4, 6, dtype=torch.float64)

    def both(draw):
        arguments = call_operator(tensors, LENGTHS, seed=draw, dropout=0.5)
        output = operator.packed_attention(*arguments)
        (of_value,) = torch.autograd.grad(output, tensors[2], gradient)
        return output, (of_value * tensors[2]).sum(), (gradient * output).sum()

    output, left, right = both(seed)
    assert torch.allclose(left, right)
    other, _, other_right = both(seed + 1)
    assert not torch.allclose(output, other)
    assert not torch.allclose(left, other_right)


def test_a_mask_is_read_as_intervals_and_refused_where_it_is_none():
    size = 16
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    lowest, highest = interval_of(causal[None, None])
    assert lowest[0].tolist() == [0] * size
    assert highest[0].tolist() == list(range(size))
    chunks = causal & (torch.arange(size)[:, None] // 4 == torch.arange(size)[None] // 4)
    tensors = qkv(LENGTHS)
    masked = operator.packed_attention(
        *call_operator(tensors, LENGTHS, interval=interval_of(chunks[None, None]))
    )
    dense = chunks.clone()
    start = 0
    for length in LENGTHS:
        dense[start : start + length, :start] = False
        start += length
    query, key, value = tensors
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense, enable_gqa=True
    )
    assert torch.allclose(masked, expected.transpose(1, 2), atol=1e-12)
    holes = causal.clone()
    holes[9, 7] = False
    interval = interval_of(holes[None, None])
    assert interval[0, 0, 9] == NO_INTERVAL
    with pytest.raises(UnsupportedAttentionError, match="not one interval"):
        operator.packed_attention(*call_operator(tensors, LENGTHS, interval=interval))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_one_launch_goes_into_the_graph_itself_where_it_computes_the_call(monkeypatch, name):
    """A stand-in for torch's varlen operator: it must be called, with the window of its layer."""
    windows = []

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        windows.append(window_size)
        left, right = (None if reach == -1 else reach for reach in window_size)
        token = torch.arange(q.shape[0])
        document = torch.searchsorted(cu_q, token, right=True)
        distance = token[None] - token[:, None]
        seen = (document[None] == document[:, None]) & (
            distance <= (right if right is not None else 1 << 30)
        )
        if left is not None:
            seen = seen & (distance >= -left)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        return out[0].transpose(0, 1)

    batch = inputs(name, LENGTHS)
    expected = build(name, dtype=torch.float64)(**batch).logits
    model = build(name, "neat_varlen:torch_varlen", torch.float64)

    def refuse(*arguments):
        raise AssertionError("the opaque operator ran")

    monkeypatch.setattr(operator, "_compute", refuse)
    monkeypatch.setattr(torch_varlen, "torch_varlen_attention", lambda: stand_in)
    monkeypatch.setattr(half_precision, "why_not", lambda call, *, lacks: None)
    run, _ = compiled(model)
    assert torch.allclose(run(**batch).logits, expected)
    assert windows == ([(-1, 0)] * 2 if name == "llama" else [(3, 0), (-1, 0)])


def test_a_window_that_is_not_the_masks_aborts_the_graph():
    causal = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    cu = packed_inputs(LENGTHS)["cu_seq_lens_q"]
    plain = traced.Reach(None, 0)
    traced._assert_described(cu, 16, 7, plain, interval_of(causal))
    with pytest.raises(RuntimeError, match="other keys than the window"):
        traced._assert_described(cu, 16, 7, traced.Reach(2, 0), interval_of(causal))
    with pytest.raises(RuntimeError, match="from 0 to the number of tokens"):
        traced._assert_described(cu, 17, 7, plain, None)
    with pytest.raises(RuntimeError, match="longer than max_length_q"):
        traced._assert_described(cu, 16, 6, plain, None)


def test_documents_without_a_token_at_the_end_of_the_offsets_change_nothing():
    model = build("llama")
    batch = inputs("llama", LENGTHS)
    cu = torch.cat([batch["cu_seq_lens_q"], batch["cu_seq_lens_q"][-1:].expand(3)])
    padded = batch | {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    assert torch.equal(model(**padded).logits, model(**batch).logits)
    call = VarlenCall(*(x[0].transpose(0, 1) for x in qkv(LENGTHS)), cu, 7, None)
    assert call.host_lengths() == tuple(LENGTHS)
    assert sdpa.attention(call).shape == (16, 4, 6)


def test_one_mask_stands_for_all_rows_of_a_batch():
    causal = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    offsets = packed_inputs([3, 5, 1, 7])["cu_seq_lens_q"]
    traced._assert_described(offsets, 16, 7, traced.Reach(None, 0), interval_of(causal))
    query, key, value = (x[0].unflatten(1, (2, 8)).transpose(0, 1) for x in qkv(LENGTHS))
    rows = operator.packed_attention(
        *call_operator((query, key, value), LENGTHS, interval=interval_of(causal))
    )
    stream = operator.packed_attention(*call_operator(qkv(LENGTHS), LENGTHS))
    assert torch.allclose(rows.flatten(0, 1), stream[0])
    with pytest.raises(RuntimeError, match="other keys than the window"):
        traced._assert_described(offsets, 16, 7, traced.Reach(2, 0), interval_of(causal))
