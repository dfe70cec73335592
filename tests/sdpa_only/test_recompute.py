"""Boundaries ride with their forward: microbatches in flight, recompute, threads, teachers, nested models."""

import contextlib
import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from sdpa_toys import MAPS, Attention, Decoder, alone, difference, gradients, make_batch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.hooks.sdpa import (
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
    pack_sdpa_only_model,
)
from hf_neat_packing.hooks.sdpa.attachment import attachment
from hf_neat_packing.hooks.sdpa.packed_forward import alive

CLOSE = 1e-12
FAR = 1e-3
RECOMPUTES = [None, "reentrant", "non_reentrant", "closure"]
OTHER_LENGTHS = [[1, 1, 1, 1, 1, 2, 2, 3], [1, 2, 3, 3, 3, 3, 4, 4]]
LIKE_LENGTHS = [[1, 2, 2, 2, 2, 2, 3, 3], [1, 1, 1, 2, 2, 3, 3, 3]]  # MAPS["full"], rows swapped


class OneSlot:
    """The documented design: one slot for the process, SDPA replaced inside attention modules."""

    def __init__(self, model):
        self.document_map = None
        self.stock = F.scaled_dot_product_attention
        for module in model.modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(self.replace)
                module.register_forward_hook(self.restore, always_call=True)

    def replace(self, module, args):
        F.scaled_dot_product_attention = self.packed

    def restore(self, module, args, output):
        F.scaled_dot_product_attention = self.stock

    def packed(self, query, key, value, attn_mask=None, is_causal=False, **options):
        if self.document_map is None or self.document_map.shape != (query.shape[0], query.shape[2]):
            return self.stock(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
            )
        same = self.document_map[:, :, None] == self.document_map[:, None, :]
        return self.stock(query, key, value, attn_mask=same.tril()[:, None], **options)


def wrap(model, kind):
    """Checkpoint wrappers as FSDP users put them on: whole layers, or only the attention inside."""
    implementation = (
        CheckpointImpl.REENTRANT if kind.endswith("-reentrant") else CheckpointImpl.NO_REENTRANT
    )
    wanted = Attention if kind.startswith("inner") else type(model.layers[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=implementation),
        check_fn=lambda m: isinstance(m, wanted),
    )
    return model


def unwrapped_names(found):
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


def two_batches(second):
    return make_batch(MAPS["full"], seed=1), make_batch(second, seed=2)


@pytest.mark.parametrize("second", [OTHER_LENGTHS, LIKE_LENGTHS], ids=["other", "alike"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_two_microbatches_in_flight_give_the_gradients_of_their_own_documents(recompute, second):
    model = Decoder(recompute=recompute)
    batches = two_batches(second)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = [model(**batch) for batch, _ in batches]
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(gradients(model), expected[index]) < CLOSE
        # Both in one backward.
        outputs = [model(**batch) for batch, _ in batches]
        sum((o * u).sum() for o, (_, u) in zip(outputs, batches, strict=True)).backward()
    total = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert difference(gradients(model), total) < CLOSE


@pytest.mark.parametrize("second", [OTHER_LENGTHS, LIKE_LENGTHS], ids=["other", "alike"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_stage_that_ends_in_a_checkpoint_is_recomputed_packed(recompute, second):
    model = Decoder(recompute=recompute)
    model.head = nn.Identity()
    batches = [(batch, upstream[..., :16]) for batch, upstream in two_batches(second)]
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = [model(**batch) for batch, _ in batches]
        torch.autograd.backward(outputs, [upstream for _, upstream in batches])
    total = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert difference(gradients(model), total) < CLOSE


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_control_one_slot_for_the_process_gives_wrong_gradients_in_flight(recompute):
    model = Decoder(recompute=recompute)
    batches = two_batches(OTHER_LENGTHS)
    expected = alone(model, *batches[0])[1]
    slot = OneSlot(model)
    outputs = []
    for batch, _ in batches:
        slot.document_map = batch.pop("_packed_seq_ids")
        outputs.append(model(**batch))
    outputs[0].backward(batches[0][1])
    assert difference(gradients(model), expected) > FAR


@pytest.mark.parametrize("kind", ["layer", "layer-reentrant", "inner", "inner-reentrant"])
@pytest.mark.parametrize("order", ["wrap_first", "attach_first"])
def test_checkpoint_wrappers_on_layers_and_on_attention_recompute_packed(kind, order):
    model = Decoder()
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    calls = []
    model.layers[0].self_attn.q.register_forward_hook(lambda *_: calls.append(1))
    if order == "wrap_first":
        wrap(model, kind)
    with pack_sdpa_only_model(model) as handle:
        if order == "attach_first":
            wrap(model, kind)
        assert handle.hooked == ("layers.0.self_attn", "layers.1.self_attn")
        outputs = [model(**batch) for batch, _ in batches]
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(unwrapped_names(gradients(model)), expected[index]) < CLOSE
    assert len(calls) == 4, "each of the two forwards was computed twice"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_checkpointed_as_a_whole_and_nested_checkpoints(reentrant):
    model = Decoder(recompute="reentrant" if reentrant else "non_reentrant")
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = []
        for batch, _ in batches:
            embeds = model.embed(batch["input_ids"])

            def run(embeds, positions, document_map):
                return model(
                    inputs_embeds=embeds, position_ids=positions, _packed_seq_ids=document_map
                )

            outputs.append(
                checkpoint(
                    run,
                    embeds,
                    batch["position_ids"],
                    batch["_packed_seq_ids"],
                    use_reentrant=reentrant,
                )
            )
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(gradients(model), expected[index]) < CLOSE


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_backward_on_another_thread_recomputes_packed(recompute):
    model = Decoder(recompute=recompute)
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = [model(**batch) for batch, _ in batches]
        for index in (0, 1):
            errors = []

            def run(index=index, errors=errors):
                try:
                    outputs[index].backward(batches[index][1])
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            assert not errors
            assert difference(gradients(model), expected[index]) < CLOSE


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_teacher_an_evaluation_and_an_unpacked_forward_in_between_change_nothing(recompute):
    model = Decoder(recompute=recompute)
    batch, upstream = make_batch(MAPS["tail"])
    other, _ = make_batch(OTHER_LENGTHS, seed=3)
    expected = alone(model, batch, upstream)[1]
    with pack_sdpa_only_model(model):
        teacher = copy.deepcopy(model)
        output = model(**batch)
        plain = model(other["input_ids"], other["position_ids"])
        with torch.no_grad():
            teacher(**other)
            model(**other)
        output.backward(upstream)
        assert difference(gradients(model), expected) < CLOSE
        # The unpacked forward in flight is recomputed unpacked.
        plain.sum().backward()
        ours = gradients(model)
    model(other["input_ids"], other["position_ids"]).sum().backward()
    assert difference(ours, gradients(model)) < CLOSE


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_control_one_slot_gives_wrong_gradients_after_a_teacher_forward(recompute):
    model = Decoder(recompute=recompute)
    batch, upstream = make_batch(MAPS["full"])
    other, _ = make_batch(OTHER_LENGTHS, seed=3)
    expected = alone(model, batch, upstream)[1]
    slot = OneSlot(model)
    slot.document_map = batch.pop("_packed_seq_ids")
    output = model(**batch)
    slot.document_map = other.pop("_packed_seq_ids")
    with torch.no_grad():
        model(**other)
    output.backward(upstream)
    assert difference(gradients(model), expected) > FAR


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_two_threads_train_two_models_at_once(recompute):
    models = [Decoder(recompute=recompute, seed=seed) for seed in (1, 2)]
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(m, *b)[1] for m, b in zip(models, batches, strict=True)]
    barrier, worst = threading.Barrier(2), {}

    def train(index):
        model, (batch, upstream) = models[index], batches[index]
        with pack_sdpa_only_model(model):
            differences = []
            for _ in range(8):
                barrier.wait()
                output = model(**batch)
                barrier.wait()
                output.backward(upstream)
                differences.append(difference(gradients(model), expected[index]))
            worst[index] = max(differences)

    threads = [threading.Thread(target=train, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst.keys() == {0, 1}
    assert max(worst.values()) < CLOSE


class Wrapped(nn.Module):
    """A model inside a model, both of which are attached to; the inner one gets no boundaries."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, position_ids):
        return self.inner(input_ids, position_ids)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_nested_model_shares_the_boundaries_of_the_model_around_it(recompute):
    inner = Decoder(recompute=recompute)
    model = Wrapped(inner)
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(inner, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model), pack_sdpa_only_model(inner):
        outputs = [model(**batch) for batch, _ in batches]
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(gradients(inner), expected[index]) < CLOSE


class Distiller(nn.Module):
    """Runs a frozen teacher, which is a model of its own and sees the same tokens unpacked."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self._teacher = student, [teacher]

    def forward(self, input_ids, position_ids):
        with torch.no_grad():
            target = self._teacher[0](input_ids, position_ids)
        return self.student(input_ids, position_ids) - target


def test_a_teacher_of_its_own_inside_the_forward_is_not_hijacked():
    student, teacher = Decoder(seed=1), Decoder(seed=2)
    batch, upstream = make_batch(MAPS["full"])
    packed, _ = alone(student, batch, upstream)
    with torch.no_grad():
        plain = teacher(batch["input_ids"], batch["position_ids"])
    with pack_sdpa_only_model(Distiller(student, teacher)) as handle, pack_sdpa_only_model(teacher):
        output = handle.module(**batch)
    assert float((output - (packed - plain)).detach().abs().max()) < CLOSE


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_backward_after_the_context_has_ended_still_recomputes_packed(recompute):
    model = Decoder(recompute=recompute)
    batch, upstream = make_batch(MAPS["full"])
    expected = alone(model, batch, upstream)[1]
    with pack_sdpa_only_model(model):
        output = model(**batch)
    output.backward(upstream)
    assert difference(gradients(model), expected) < CLOSE
    del output
    gc.collect()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("recompute", [None, "non_reentrant", "closure"])
def test_a_graph_that_nobody_holds_is_freed_at_once(recompute):
    model = Decoder(recompute=recompute)
    batch, _ = make_batch(MAPS["tail"])
    gc.collect()
    gc.disable()
    try:
        with pack_sdpa_only_model(model):
            model(**batch)
            model(batch["input_ids"], batch["position_ids"])
            assert not alive(attachment(model).number)
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_offloaded_activations_still_go_through_the_hooks_of_the_user(recompute):
    model = Decoder(recompute=recompute)
    batch, upstream = make_batch(MAPS["tail"])
    expected = alone(model, batch, upstream)[1]
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor):
        counts["packed"] += 1
        return tensor.numpy(force=True).copy()

    def unpack(array):
        counts["unpacked"] += 1
        return torch.from_numpy(array)

    with pack_sdpa_only_model(model), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = model(**batch)
        inside = counts["packed"]
    output.backward(upstream)
    assert inside > 2
    assert counts["unpacked"] > 2
    assert difference(gradients(model), expected) < CLOSE


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(recompute):
    model = Decoder(recompute=recompute)
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = [model(**batch) for batch, _ in batches]
        for index in (0, 1, 0):
            outputs[index].backward(batches[index][1], retain_graph=True)
            assert difference(gradients(model), expected[index]) < CLOSE
        # Outside of a model and of a backward, a layer is nobody's packed forward.
        layer = model.layers[0]
        hidden = torch.randn(2, 8, 16, dtype=torch.float64)
        with torch.no_grad():
            attached = layer(hidden, batches[0][0]["position_ids"])
    del outputs
    gc.collect()
    with torch.no_grad():
        assert torch.equal(attached, layer(hidden, batches[0][0]["position_ids"]))


@pytest.mark.parametrize("where", ["model", "attention"])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant"])
def test_compiled_models_and_layers_follow_the_boundaries_of_each_batch(recompute, where):
    torch.compiler.reset()
    model, reference = Decoder(layers=1, recompute=recompute), Decoder(layers=1)
    compiled = model
    if where == "model":
        compiled = torch.compile(model, backend="eager")
    else:
        for layer in model.layers:
            layer.self_attn.compile(backend="eager")
    maps = [MAPS["full"], OTHER_LENGTHS]
    batches = [make_batch(document_map, seed) for seed, document_map in enumerate(maps)]
    expected = [alone(reference, batch, upstream)[1] for batch, upstream in batches]
    with pack_sdpa_only_model(model):
        outputs = [compiled(**batch) for batch, _ in batches]
        for index, output in enumerate(outputs):
            output.backward(batches[index][1])
            assert difference(gradients(model), expected[index]) < CLOSE


class InnerCheckpoint(nn.Module):
    """Checkpoints inside its attention, where no module call would be hooked again."""

    def __init__(self, reentrant):
        super().__init__()
        self.qkv, self.reentrant = nn.Linear(8, 24, dtype=torch.float64), reentrant

    def forward(self, x):
        def attend(qkv):
            q, k, v = (y[:, None] for y in qkv.chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

        return checkpoint(attend, self.qkv(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_an_attention_module_is_refused_not_recomputed_plain(reentrant):
    model = nn.Sequential()
    model.add_module("attn", InnerCheckpoint(reentrant))
    with (
        pack_sdpa_only_model(model),
        pytest.raises(UnsupportedModelError, match="starts a checkpoint"),
    ):
        model(
            torch.randn(1, 4, 8, dtype=torch.float64), _packed_seq_ids=torch.tensor([[1, 1, 2, 2]])
        )


def test_a_recompute_whose_boundaries_are_lost_is_an_error():
    """A user's saved-tensor hooks inside the model hide the checkpoint's inputs from the model's."""

    class Hiding(Decoder):
        def forward(self, **inputs):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                return super().forward(**inputs)

    model = Hiding(recompute="reentrant")
    batch, upstream = make_batch(MAPS["full"])
    with pack_sdpa_only_model(model):
        output = model(**batch)
        with pytest.raises(UnsupportedModelError, match="did not come with the saved tensors"):
            output.backward(upstream)


class SaysItself(Decoder):
    """A model that enables its own boundaries, as the documented protocol has it."""

    def forward(self, input_ids, position_ids, doc_ids=None):
        disable_cp1_packed_varlen()
        embeds = self.embed(input_ids)
        if doc_ids is not None:
            enable_cp1_packed_varlen(doc_ids, "sdpa")
        return super().forward(position_ids=position_ids, inputs_embeds=embeds)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_the_documented_protocol_keeps_microbatches_apart(recompute):
    model = SaysItself(recompute=recompute)
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with attach_cp1_packed_varlen_hooks(model):
        outputs = [
            model(b["input_ids"], b["position_ids"], b["_packed_seq_ids"]) for b, _ in batches
        ]
        plain = model(batches[0][0]["input_ids"], batches[0][0]["position_ids"])
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(gradients(model), expected[index]) < CLOSE
    real = batches[0][0]["_packed_seq_ids"] != 0
    assert float((plain - outputs[0])[real].detach().abs().max()) > FAR, (
        "an unpacked forward stays plain"
    )


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_caller_may_enable_before_the_forward_and_disable_after_it(recompute):
    model = Decoder(recompute=recompute)
    batches = two_batches(OTHER_LENGTHS)
    expected = [alone(model, batch, upstream)[1] for batch, upstream in batches]
    with attach_cp1_packed_varlen_hooks(model), contextlib.ExitStack() as stack:
        stack.callback(disable_cp1_packed_varlen)
        outputs = []
        for batch, _ in batches:
            enable_cp1_packed_varlen(batch["_packed_seq_ids"], "auto")
            outputs.append(model(batch["input_ids"], batch["position_ids"]))
        disable_cp1_packed_varlen()
        for index in (0, 1):
            outputs[index].backward(batches[index][1])
            assert difference(gradients(model), expected[index]) < CLOSE
