"""The audit has to fail where it should, and say where and why."""

import pytest
import torch
from broken_models import (
    CentredByRow,
    RemembersLastCall,
    ShiftsByRowIndex,
    checkpointed,
    llama,
    with_hook_removed_before_backward,
    with_leaky_conv_head,
    with_norm,
)

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit import assert_isolated, audit_model
from hf_neat_packing.audit.batches import LENGTHS
from hf_neat_packing.audit.isolation_checks import decided_by_gradients
from hf_neat_packing.audit.result import Check
from hf_neat_packing.audit.zoo import tiny_model
from hf_neat_packing.errors import BoundaryError, UnsupportedModelError


def failed(report):
    return {check.name for check in report.failed}


def test_a_leaky_convolution_before_the_head_is_named():
    report = audit_model(with_leaky_conv_head())
    assert report.verdict == "wrong"
    assert {"isolation, bitwise", "isolation, gradients", "outputs"} <= failed(report)
    assert report.finding.module == "lm_head.conv"
    assert report.finding.cause == "R"
    assert "isolate(model)" in report.finding.advice


def test_a_mean_over_the_row_is_named_with_its_layer():
    report = audit_model(with_norm(CentredByRow))
    assert report.verdict == "wrong"
    assert report.finding.module == "model.layers.1.input_layernorm"
    assert report.finding.class_name == "CentredByRow"
    assert report.finding.cause == "row"


def test_state_kept_between_calls_is_named():
    report = audit_model(with_norm(RemembersLastCall))
    assert "no state between calls" in failed(report)
    assert report.finding.module == "model.layers.1.input_layernorm"
    assert report.finding.cause == "state"


def test_an_index_counted_through_the_row_is_wrong_although_isolated():
    report = audit_model(with_norm(ShiftsByRowIndex))
    assert report.verdict == "wrong"
    assert "isolation, bitwise" not in failed(report)
    assert "outputs" in failed(report)
    assert report.finding.module == "model.layers.1.input_layernorm"
    assert report.finding.cause == "T"


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["silent", "noticed by torch"])
def test_a_hook_removed_before_the_backward_is_named(use_reentrant):
    report = audit_model(with_hook_removed_before_backward(LENGTHS, use_reentrant=use_reentrant))
    assert report.mode == "train"
    assert "outputs" not in failed(report)
    assert {"isolation, gradients", "gradients"} <= failed(report)
    assert report.finding.cause == "backward"
    assert report.finding.module == "model.layers.1.input_layernorm"


def test_gradient_checkpointing_alone_is_exact():
    model = llama()
    checkpointed(model, use_reentrant=False)
    assert audit_model(model).verdict == "exact"


@pytest.mark.parametrize(
    ("model_type", "layer_type", "code"),
    [
        ("mamba2", "linear_attention", "R"),
        ("qwen3_next", "linear_attention", "R"),
        ("lfm2", "conv", "R"),
    ],
)
def test_a_recurrent_layer_without_hooks_is_named_with_its_type(model_type, layer_type, code):
    model = tiny_model(model_type, attn_implementation="neat_varlen")
    batch = DataCollatorForNeatPacking(llama())(
        [{"input_ids": list(range(a, a + n))} for a, n in ((5, 6), (20, 9))]
    )
    # Offsets would make the mixers of some types raise, for want of a kernel.
    batch = {name: batch[name] for name in ("input_ids", "position_ids", "_packed_seq_ids")}
    report = audit_model(model, batch=batch)
    assert report.verdict == "wrong"
    assert report.finding.layer_type == layer_type
    assert report.finding.cause == code


def test_assert_isolated_says_where_why_and_what_to_do():
    with pytest.raises(
        UnsupportedModelError, match=r"lm_head\.conv .*runs on across document borders.*isolate"
    ):
        assert_isolated(with_leaky_conv_head())


def test_a_batch_whose_boundaries_the_model_does_not_read_fails():
    # Varlen kwargs for a model whose key reads masks: plain causal attention over the row.
    batch = DataCollatorForNeatPacking(llama())(
        [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}]
    )
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    report = audit_model(llama("sdpa"), batch=batch)
    assert report.verdict == "wrong"
    assert report.finding.module == "model.layers.0.self_attn"
    assert report.finding.cause == "mask"


def test_one_document_is_refused_because_nothing_could_leak():
    batch = DataCollatorForNeatPacking(llama())([{"input_ids": [5, 6, 7]}])
    with pytest.raises(BoundaryError, match="two documents or more"):
        audit_model(llama(), batch=batch)


def test_a_batch_without_boundaries_is_refused():
    with pytest.raises(BoundaryError, match="says nowhere where documents begin"):
        audit_model(llama(), batch={"input_ids": torch.tensor([[5, 6, 7, 8]])})


def test_a_column_that_is_no_token_column_is_refused_by_name():
    batch = DataCollatorForNeatPacking(llama())([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    with pytest.raises(BoundaryError, match="'audio_features'"):
        audit_model(llama(), batch={**batch, "audio_features": torch.zeros(1, 3, 4)})
    with pytest.raises(BoundaryError, match=r"pixel_values.*names no id of image placeholders"):
        audit_model(llama(), batch={**batch, "pixel_values": torch.zeros(1, 3, 4, 4)})


def test_a_passing_model_that_ignores_its_context_is_inconclusive():
    class Bigram(torch.nn.Module):
        """Each token's logits depend on that token alone: it passes without boundaries too."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(64, 64)

        def forward(self, input_ids, attention_mask=None, **kwargs):
            return self.table(input_ids)

    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8]]),
        "_packed_seq_ids": torch.tensor([[1, 1, 2, 2]]),
    }
    report = audit_model(Bigram(), batch=batch)
    assert report.verdict == "inconclusive"
    assert all(check.is_control for check in report.failed)


def test_a_movement_within_rounding_passes_only_where_gradients_are_exactly_zero():
    moved = Check("isolation, bitwise", True, "moved", 1e-6, 1e-5)
    zero, unknown = Check("gradients", True, "zero"), Check("gradients", None, "none")
    assert decided_by_gradients(moved, zero).passed
    assert decided_by_gradients(moved, unknown).passed is False
    still = Check("isolation, bitwise", True, "no bit moved", 0.0, 0.0)
    assert decided_by_gradients(still, unknown).passed
