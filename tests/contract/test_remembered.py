"""A dry run that passed is remembered for exactly what was run; a refusal never is."""

import copy
import json
import os

import pytest
import torch
from contract_exactness import tiny_llama
from test_contract_callback import trainer_for
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from hf_neat_packing import DataCollatorForNeatPacking, remembered
from hf_neat_packing.callback import PackingCallback
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.fingerprint import fingerprint
from hf_neat_packing.isolation import isolate
from hf_neat_packing.remembered import memory_file, prove_isolation_once


def prove(model, **options):
    return prove_isolation_once(model, DataCollatorForNeatPacking(model, **options))


def forget_the_process(monkeypatch):
    monkeypatch.setattr(remembered, "_KNOWN", {})


def digest(model, **options):
    return fingerprint(model, DataCollatorForNeatPacking(model, **options))


def bloom():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    return BloomForCausalLM._from_config(config, attn_implementation="neat_varlen")


def test_the_second_train_start_runs_nothing_and_knows_what_the_first_measured(monkeypatch):
    first = prove(tiny_llama("neat_varlen"))
    assert not first.remembered
    calls = []
    monkeypatch.setattr(remembered, "prove_isolation", lambda *a: calls.append(1))
    second = prove(tiny_llama("neat_varlen"))
    assert second.remembered
    assert second.isolation == first.isolation
    # Another process finds it in the file.
    forget_the_process(monkeypatch)
    third = prove(tiny_llama("neat_varlen"))
    assert third.remembered
    assert third.isolation == first.isolation
    assert not calls
    assert memory_file().stat().st_size < 4096
    # Other row lengths are the same run.
    assert prove(tiny_llama("neat_varlen"), row_length=64).remembered


def test_a_refusal_is_never_remembered():
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="layer"):
            prove(bloom())
    assert not memory_file().exists()


def test_hooks_that_came_off_take_their_proof_with_them():
    model = bloom()
    with isolate(model):
        assert not prove(model).remembered
        assert prove(model).remembered
    with pytest.raises(UnsupportedModelError, match="layer"):
        prove(model)


class Louder(LlamaForCausalLM):
    pass


def more_layers(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def other_config(model):
    model.config.rms_norm_eps = 1e-3


def other_class(model):
    model.model.norm = nn.LayerNorm(32)


def own_forward(model):
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def own_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


def zero_weights(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()


def in_double(model):
    model.double()


def own_attribute(model):
    model.model.layers[0].self_attn.is_causal = False


CHANGES = [
    *(more_layers, other_config, other_class, own_forward, own_hook, zero_weights, in_double),
    own_attribute,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_run_changes_the_digest(change):
    model = tiny_llama("neat_varlen")
    before = digest(model)
    assert before == digest(tiny_llama("neat_varlen")) is not None
    change(model)
    assert digest(model) not in (before, None)


def test_keys_layouts_and_label_rules_have_digests_of_their_own():
    models = {key: tiny_llama(key) for key in ("neat_varlen", "sdpa", "eager")}
    digests = [digest(model) for model in models.values()]
    digests.append(digest(models["neat_varlen"], shifted_labels=False))
    digests.append(digest(models["neat_varlen"], position_ids_start=2))
    digests.append(digest(models["sdpa"], return_seq_idx=True))
    assert None not in digests
    assert len(set(digests)) == len(digests)


def test_a_function_that_was_replaced_in_a_modelling_module_changes_the_digest(monkeypatch):
    import transformers.models.llama.modeling_llama as modelling

    model = tiny_llama("neat_varlen")
    before = digest(model)
    monkeypatch.setattr(modelling, "rotate_half", lambda x: x)
    assert digest(model) != before
    monkeypatch.undo()
    assert digest(model) == before
    monkeypatch.setattr(modelling.LlamaMLP, "forward", lambda self, x: x)
    assert digest(model) != before
    monkeypatch.undo()
    # As tools do that pack for the flash keys.
    replaced = lambda attention_mask: None  # noqa: E731
    monkeypatch.setattr("transformers.modeling_flash_attention_utils._get_unpad_data", replaced)
    assert digest(model) != before
    monkeypatch.undo()
    attention = torch.nn.functional.scaled_dot_product_attention
    wrapped = lambda *args, **kwargs: attention(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", wrapped)
    assert digest(model) != before


def test_a_collator_of_ones_own_is_not_remembered():
    class Own(DataCollatorForNeatPacking):
        pass

    model = tiny_llama("neat_varlen")
    assert fingerprint(model, Own(model)) is None
    assert not prove_isolation_once(model, Own(model)).remembered
    assert not memory_file().exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"x": 1}', "\x00"])
def test_a_file_that_cannot_be_read_is_as_good_as_none(text, monkeypatch):
    memory_file().parent.mkdir(parents=True)
    memory_file().write_text(text)
    assert not prove(tiny_llama("neat_varlen")).remembered
    forget_the_process(monkeypatch)
    assert prove(tiny_llama("neat_varlen")).remembered


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", "all"), ("change_in_second", None), ("layers", [{"name": "x"}]), ("leak", 1.0)],
)
def test_an_entry_that_is_no_pass_is_not_taken_for_one(field, value, monkeypatch):
    model = tiny_llama("neat_varlen")
    prove(model)
    entries = json.loads(memory_file().read_text())
    entry = next(iter(entries.values()))
    if field == "leak":
        entry["layers"][0]["change_in_second"] = value
    else:
        entry[field] = value
    memory_file().write_text(json.dumps(entries))
    forget_the_process(monkeypatch)
    assert not prove(model).remembered


def test_a_folder_that_cannot_be_written_stops_nobody(monkeypatch):
    memory_file().parent.parent.mkdir(parents=True, exist_ok=True)
    memory_file().parent.write_text("a file in the way")
    assert not prove(tiny_llama("neat_varlen")).remembered
    assert prove(tiny_llama("neat_varlen")).remembered  # in this process


def test_the_file_stays_small(monkeypatch):
    monkeypatch.setattr(remembered, "_MOST_PROOFS", 2)
    for start in range(3):
        prove(tiny_llama("neat_varlen"), position_ids_start=start)
    assert len(json.loads(memory_file().read_text())) == 2
    assert os.listdir(memory_file().parent) == [memory_file().name]


def test_the_callback_skips_what_is_remembered_and_what_is_named(tmp_path):
    trainer, callback = trainer_for(tiny_llama("neat_varlen"), tmp_path)
    trainer.train()
    assert not callback.remembered
    trainer, callback = trainer_for(tiny_llama("neat_varlen"), tmp_path)
    trainer.train()
    assert callback.remembered
    assert len(callback.proof.layers) == 2


def begin(callback, model):
    from types import SimpleNamespace

    loader = torch.utils.data.DataLoader([], collate_fn=DataCollatorForNeatPacking(model))
    callback.on_train_begin(
        SimpleNamespace(n_gpu=1), None, None, model=model, train_dataloader=loader
    )


def test_the_dry_run_is_left_out_for_named_classes_only():
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM"):
        begin(PackingCallback(skip_dry_run=("LlamaForCausalLM",)), bloom())
    for names in (("BloomForCausalLM",), "BloomForCausalLM", {"BloomForCausalLM", "Other"}):
        callback = PackingCallback(skip_dry_run=names)
        begin(callback, bloom())
        assert callback.proof is None


@pytest.mark.parametrize("names", [True, False, 1, None, ("",), ("Llama For",), (True,)])
def test_a_bare_switch_is_refused(names):
    with pytest.raises(ContractError, match=r'skip_dry_run=\("LlamaForCausalLM",\)'):
        PackingCallback(skip_dry_run=names)
