"""`isolate` on models that nobody has seen: what it finds, heals, refuses, and leaves behind."""

import json

import pytest
import torch
from isolation.mixing_models import (
    ConvolutionalHead,
    FaintMean,
    Recurrent,
    RemembersCalls,
    RowMean,
    TinyModel,
    TinyModelThatShowsItsEmbeddings,
    documents,
    tiny,
    values,
)
from torch import nn

from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.contract import PackingCapabilities
from hf_neat_packing.errors import UnsupportedModelError
from hf_neat_packing.hooks.recurrent import run_per_document
from hf_neat_packing.isolation import isolate, isolation_of

LENGTHS = [7, 1, 12, 5, 9]


def batch_of(docs):
    collate = DataCollatorForNeatPacking(contract=PackingCapabilities("flash_varlen"))
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels")
    return batch


def error_against_alone(model, docs):
    with torch.no_grad():
        packed = values(model(**batch_of(docs)))[0]
        alone = torch.cat([values(model(input_ids=ids[None]))[0] for ids in docs])
    return float((packed - alone).abs().max() / alone.abs().max())


def moved_documents(model, docs):
    """List documents of which some bit moves when the first document is another one."""
    other = [(docs[0] + 7) % 60, *docs[1:]]
    with torch.no_grad():
        one, two = (values(model(**batch_of(d)))[0] for d in (docs, other))
    parts = [t.split([len(d) for d in docs]) for t in (one, two)]
    pairs = list(zip(*parts, strict=True))[1:]
    return [number for number, pair in enumerate(pairs, 1) if not torch.equal(*pair)]


@pytest.mark.parametrize("layer", [Recurrent, ConvolutionalHead, RowMean])
def test_a_mixing_layer_is_found_by_measurement_and_isolated_bit_for_bit(layer):
    model = tiny(layer())
    docs = documents(LENGTHS)
    assert moved_documents(model, docs)
    assert error_against_alone(model, docs) > 1e-2
    with isolate(model) as report:
        assert moved_documents(model, docs) == []
        assert error_against_alone(model, docs) < 1e-5
    assert report.applied
    assert any(part.modules[0].startswith("layer") for part in report.applied)
    assert moved_documents(model, docs)


@pytest.mark.parametrize(
    ("model", "share"), [(TinyModel, 1e-4), (TinyModelThatShowsItsEmbeddings, 3e-6)]
)
def test_a_leak_as_faint_as_rounding_is_isolated_too(model, share):
    """Exact zeros need no tolerance: a gradient that crosses is no rounding."""
    torch.manual_seed(0)
    mixing = model(FaintMean(share)).eval()
    docs = documents(LENGTHS)
    assert moved_documents(mixing, docs)
    with isolate(mixing):
        assert moved_documents(mixing, docs) == []
    assert moved_documents(mixing, docs)


def test_the_found_module_is_the_deepest_one():
    report = isolate(tiny(nn.Sequential(nn.Linear(32, 32), Recurrent(), nn.Linear(32, 32))))
    assert [part.modules for part in report.applied] == [("layer.1.cell",)]


def test_a_layer_that_padding_disturbs_runs_once_per_length():
    (applied,) = isolate(tiny(RowMean())).applied
    assert "unpadded" in applied.repair


def test_positions_counted_along_the_row_restart_for_each_document():
    model = tiny(nn.Identity(), positions=True)
    docs = documents(LENGTHS)
    assert error_against_alone(model, docs) > 1e-2
    report = isolate(model)
    assert error_against_alone(model, docs) < 1e-6
    assert [part.modules for part in report.applied] == [("places",)]


def test_a_module_that_keeps_state_between_calls_is_refused_by_name():
    model = tiny(RemembersCalls())
    with pytest.raises(UnsupportedModelError, match="TinyModel"):
        isolate(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_is_left_after_removal():
    model = tiny(Recurrent()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    report = isolate(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    report.remove()
    report.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_gradients_of_a_document_never_reach_another_one():
    model = tiny(Recurrent())
    docs = documents(LENGTHS)
    batch = batch_of(docs)
    embeddings = model.tokens(batch.pop("input_ids")).detach().requires_grad_()

    def foreign_gradient():
        output = values(model(inputs_embeds=embeddings, **batch))
        (gradient,) = torch.autograd.grad(output[:, 8:20].square().sum(), embeddings)
        outside = torch.cat([gradient[:, :8], gradient[:, 20:]], 1)
        return int((outside != 0).sum()), int((gradient[:, 8:20] != 0).sum())

    assert foreign_gradient()[0] > 0
    with isolate(model):
        foreign, own = foreign_gradient()
    assert foreign == 0
    assert own > 0


def test_rows_of_their_own_and_padding_are_kept_apart_too():
    model = tiny(Recurrent())
    docs = documents(LENGTHS)
    collate = DataCollatorForNeatPacking(
        contract=PackingCapabilities("flash_varlen"), row_length=24
    )
    batch = collate([{"input_ids": ids.tolist()} for ids in docs])
    assert batch["input_ids"].shape[0] > 1
    alone = {tuple(ids.tolist()): values(model(input_ids=ids[None]))[0] for ids in docs}
    with isolate(model), torch.no_grad():
        output = values(model(**batch))
    found = 0
    for row, numbers in enumerate(batch["_packed_seq_ids"]):
        for number in range(1, int(numbers.max()) + 1):
            ids = tuple(batch["input_ids"][row][numbers == number].tolist())
            torch.testing.assert_close(output[row][numbers == number], alone[ids])
            found += 1
    assert found == len(docs)


def test_documents_of_far_lengths_take_several_calls_and_little_padding():
    model = tiny(Recurrent())
    docs = documents([400, 3, 2, 380, 1, 90])
    widths = []
    with run_per_document(model, [model.layer]):
        model.layer.cell.register_forward_pre_hook(
            lambda module, args: widths.append(tuple(args[0].shape[:2]))
        )
        assert error_against_alone(model, docs) < 1e-5
    packed = widths[: -len(docs)]
    assert len(packed) > 1
    assert sum(rows * width for rows, width in packed) < 1.3 * 876


def test_a_teacher_inside_a_students_forward_sees_its_own_documents():
    student, teacher = tiny(Recurrent()), tiny(Recurrent())
    docs, others = documents(LENGTHS), documents([5, 20, 9], seed=3)
    expected = None

    def call_teacher(module, args):
        with torch.no_grad():
            assert torch.equal(values(teacher(**batch_of(others))), expected)

    with isolate(student), isolate(teacher), torch.no_grad():
        expected = values(teacher(**batch_of(others)))
        alone = values(student(**batch_of(docs)))
        student.layer.register_forward_pre_hook(call_teacher)
        assert torch.equal(values(student(**batch_of(docs))), alone)


def test_batches_that_are_not_packed_pass_unchanged():
    model = tiny(Recurrent())
    ids = torch.stack(documents([6, 6, 6]))
    with torch.no_grad():
        before = model(input_ids=ids)
        with isolate(model):
            assert torch.equal(model(input_ids=ids), before)


def test_a_hooked_layer_called_without_its_model_refuses_to_guess():
    model = tiny(Recurrent())
    with (
        run_per_document(model, [model.layer]),
        pytest.raises(UnsupportedModelError, match="outside of a forward"),
    ):
        model.layer(torch.randn(1, 5, 32))


def test_a_forward_that_raises_leaves_no_boundaries_behind():
    model = tiny(Recurrent())
    docs = documents(LENGTHS)
    with isolate(model):
        expected = values(model(**batch_of(docs)))
        broken = model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch_of(docs))
        broken.remove()
        ids = docs[0][None]
        assert torch.equal(model(input_ids=ids), tiny(Recurrent())(input_ids=ids))
        assert torch.equal(values(model(**batch_of(docs))), expected)


def test_a_second_call_keeps_the_hooks_that_are_there():
    model = tiny(Recurrent())
    report = isolate(model)
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    assert isolate(model) is report
    assert isolation_of(model) is report
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert "Recurrent" not in json.dumps(report.to_dict())
    assert "GRU" in json.dumps(report.to_dict())
    report.remove()
    assert isolation_of(model) is None


class NamesItsInputs(nn.Module):
    """A forward without `**kwargs`, which takes no boundaries itself."""

    packed_mask_type = "flash_varlen"

    def __init__(self):
        super().__init__()
        self.model = tiny(Recurrent())

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids)


class NamesPositions(NamesItsInputs):
    def forward(self, input_ids, position_ids=None):
        return self.model(input_ids=input_ids)


@pytest.mark.parametrize("cls", [NamesItsInputs, NamesPositions])
def test_hooks_at_the_entry_take_what_the_forward_does_not(cls):
    model = cls().eval()
    with pytest.raises(UnsupportedModelError, match=cls.__name__):
        DataCollatorForNeatPacking(model)
    assert isolate(model).applied
    docs = documents(LENGTHS)
    batch = DataCollatorForNeatPacking(model)([{"input_ids": ids.tolist()} for ids in docs])
    batch.pop("labels")
    with torch.no_grad():
        parts = values(model(**batch))[0].split(LENGTHS)
        for part, ids in zip(parts, docs, strict=True):
            alone = values(model(input_ids=ids[None]))[0]
            assert float((part - alone).abs().max()) <= 1e-6 * float(alone.abs().max())
