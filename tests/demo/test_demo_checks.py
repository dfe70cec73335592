"""The exactness check and the speed comparison of the demonstration, on a tiny model."""

import pytest
import torch

from hf_neat_packing import DataCollatorForNeatPacking
from hf_neat_packing.contract import DOCUMENT_MAP_KEY
from hf_neat_packing.demo.exactness import check_isolation, plain_row
from hf_neat_packing.demo.run import check_pack, save_and_reload
from hf_neat_packing.demo.throughput import compare_speeds, timed_step, ways_of
from hf_neat_packing.errors import ColumnError


def test_documents_of_a_pack_are_isolated_and_the_control_is_not(tiny_llama, pack):
    checked = check_pack(tiny_llama, pack)
    assert checked.packed.exact
    assert (checked.packed.documents, checked.packed.tokens) == (10, 57)
    assert not checked.control.exact
    assert checked.control.logits_moved > 0
    assert checked.control.gradient_leaked > 0


def test_boundaries_that_are_one_token_off_are_found(tiny_llama, pack):
    batch = DataCollatorForNeatPacking(tiny_llama)([pack])
    wrong = dict(batch)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        wrong[name] = batch[name].clone()
        wrong[name][1] -= 1
        wrong[name][-2] -= 1
    found = check_isolation(tiny_llama, wrong, batch[DOCUMENT_MAP_KEY])
    assert found.logits_moved > 0
    assert found.gradient_leaked > 0


def test_the_check_leaves_the_model_as_it_was(tiny_llama, pack):
    before = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    tiny_llama.train()
    check_pack(tiny_llama, pack)
    assert tiny_llama.training
    assert all(parameter.grad is None for parameter in tiny_llama.parameters())
    assert not tiny_llama.get_input_embeddings()._forward_hooks
    after = tiny_llama.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_pack_of_one_document_cannot_be_checked(tiny_llama):
    batch = DataCollatorForNeatPacking(tiny_llama)([{"input_ids": [[1, 2, 3]]}])
    with pytest.raises(ColumnError, match="larger --max-length"):
        check_isolation(tiny_llama, plain_row(batch), batch[DOCUMENT_MAP_KEY])


def test_three_ways_compute_the_same_loss_and_only_padding_computes_more(tiny_llama, pack):
    speeds = compare_speeds(tiny_llama, pack, rounds=1)
    assert [speed.name for speed in speeds] == ["neat_varlen", "sdpa, packed", "sdpa, padded"]
    # Float32 sums in another order: twice the spread of the three is no bound of ours, so compare
    # with what the documents give one by one in float64.
    alone = mean_loss_alone(tiny_llama, pack)
    spacing = torch.finfo(torch.float32).eps * abs(alone) * 57
    assert all(abs(speed.loss - alone) <= spacing for speed in speeds)
    # Eight documents padded to 12 tokens, then two padded to 8.
    assert [speed.computed_tokens for speed in speeds] == [57, 57, 8 * 12 + 2 * 8]
    assert all(speed.tokens_per_second > 0 for speed in speeds)


def mean_loss_alone(model, pack) -> float:
    model = model.double().eval()
    total, count = 0.0, 0
    for ids in pack["input_ids"]:
        if len(ids) > 1:
            row = torch.tensor([ids])
            with torch.no_grad():
                total += float(model(input_ids=row, labels=row).loss) * (len(ids) - 1)
            count += len(ids) - 1
    model.float()
    return total / count


def test_the_comparison_leaves_weights_key_and_gradients_alone(tiny_llama, pack):
    before = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    compare_speeds(tiny_llama, pack, rounds=1)
    assert tiny_llama.config._attn_implementation == "neat_varlen"
    assert all(parameter.grad is None for parameter in tiny_llama.parameters())
    after = tiny_llama.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_batch_with_nothing_to_predict_adds_no_nan(tiny_llama, pack):
    ways = ways_of(tiny_llama, pack, pad_token_id=0)
    ones = {"input_ids": torch.tensor([[3], [4]]), "labels": torch.tensor([[3], [4]])}
    _, loss = timed_step(tiny_llama, [*ways[0].batches, ones])
    assert loss == loss
    assert loss > 0


def test_a_saved_model_read_back_gives_the_same_logits(tiny_llama, tokenizer, pack, tmp_path):
    saved = save_and_reload(tiny_llama, tokenizer, tmp_path / "out", pack)
    assert saved.same_logits
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
