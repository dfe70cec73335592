import torch
from broken_models import llama

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.audit import audit_model
from hf_neat_packing.audit.batches import LENGTHS, random_documents, read_batch
from hf_neat_packing.audit.oracle import Truths, loss_is_shifted
from hf_neat_packing.audit.zoo import tiny_model


def packed_for(model, **options):
    return read_batch(DataCollatorForNeatPacking(model, **options)(random_documents(model)), model)


def test_the_truth_is_each_document_alone_in_float64():
    model = llama()
    packed = packed_for(model)
    truth = Truths(model, packed).in_mode("eval")
    wide = tiny_model("llama", attn_implementation="eager", dtype=torch.float64)
    for span, values in zip(packed.spans, truth.values, strict=True):
        ids = span.of(packed.input_ids)[None]
        torch.testing.assert_close(wide(input_ids=ids).logits[0], values, rtol=1e-9, atol=1e-9)
    loss = sum(
        float(
            wide(
                input_ids=span.of(packed.input_ids)[None], labels=span.of(packed.input_ids)[None]
            ).loss
        )
        * (span.length - 1)
        for span in packed.spans
        if span.length > 1
    )
    # The model's own loss is computed in float32.
    assert abs(truth.loss - loss) < 1e-6 * loss
    assert truth.num_labels == sum(LENGTHS) - len(LENGTHS)


def test_bounds_are_far_below_what_one_wrong_document_does():
    report = audit_model(llama())
    for check in report.checks:
        if check.name == "control: outputs":
            assert check.measured > 1e3 * check.bound


def test_bounds_grow_with_the_rounding_of_the_dtype():
    narrow = tiny_model("llama", attn_implementation="neat_varlen", dtype=torch.bfloat16)
    wide = llama()
    bounds = [
        Truths(model, packed_for(model)).in_mode("eval").values_bound for model in (narrow, wide)
    ]
    assert bounds[0] > 1e3 * bounds[1]
    assert audit_model(narrow).verdict == "exact"


def test_whether_a_loss_shifts_is_measured():
    causal, masked = llama(), tiny_model("bert:masked")
    assert loss_is_shifted(causal, packed_for(causal))
    assert not loss_is_shifted(masked, packed_for(masked))


def test_every_token_of_the_changed_document_changes_and_no_other():
    model = llama()
    packed = packed_for(model)
    for document in range(len(LENGTHS)):
        changed = packed.changed(document)["input_ids"] != packed.input_ids
        assert torch.equal(changed, packed.tokens_of(document))


def test_no_token_id_is_in_two_documents():
    documents = [set(d["input_ids"]) for d in random_documents(llama())]
    assert sum(map(len, documents)) == len(set().union(*documents))


def test_a_loss_that_breaks_for_documents_alone_is_left_out_and_said():
    # GIT cuts off the tokens of an image before its loss, so short texts have none.
    report = audit_model(tiny_model("git", attn_implementation="eager"))
    assert report.verdict == "exact"
    assert any("own loss raises for documents alone" in note for note in report.notes)


def test_a_truth_that_has_no_backward_in_evaluation_is_said():
    report = audit_model(tiny_model("reformer"), batch=unpacked_rows(tiny_model("reformer")))
    assert report.mode == "eval"
    assert any("no gradients were compared" in note for note in report.notes)
    assert {check.name for check in report.checks if check.passed is None} >= {
        "isolation, gradients"
    }


def unpacked_rows(model):
    """Two rows of one document each: isolated in every model."""
    ids = torch.tensor([d["input_ids"][:8] for d in random_documents(model, (8, 8))])
    return {"input_ids": ids, "_packed_seq_ids": torch.ones_like(ids)}
