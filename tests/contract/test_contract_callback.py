"""What is checked again when training begins, and that nothing outside the model is touched."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from contract_exactness import tiny_llama
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from hf_neat_packing.callback import PackingCallback, require_same_layout
from hf_neat_packing.capabilities import configure_packing_for_models
from hf_neat_packing.collator import DataCollatorForNeatPacking
from hf_neat_packing.contract import PackingCapabilities
from hf_neat_packing.dry_run import prove_isolation
from hf_neat_packing.errors import ContractError, UnsupportedModelError
from hf_neat_packing.isolation import isolate
from hf_neat_packing.two_documents import attention_layers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


def build(model_class, config, key):
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=key)


def rows():
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(5, 97, (length,), generator=generator).tolist()}
        for length in (5, 9, 3, 7, 4, 6, 8, 2)
    ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


def trainer_for(model, tmp_path, *, collator=None, data=None, **arguments):
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    callback = PackingCallback()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**(settings | arguments)),
        train_dataset=rows() if data is None else data,
        data_collator=collator or DataCollatorForNeatPacking(model),
        callbacks=[callback],
    )
    return trainer, callback


@pytest.mark.parametrize("key", ["sdpa", "eager", "neat_varlen"])
def test_training_begins_when_everything_fits(key, tmp_path):
    model = tiny_llama(key)
    trainer, callback = trainer_for(model, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    assert [layer.name for layer in callback.proof.layers] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    for layer in callback.proof.layers:
        assert layer.saw_boundaries
        assert layer.change_in_first > 0
        assert layer.change_in_second == 0
    assert callback.proof.change_in_second == 0


def test_nothing_in_the_process_is_patched_by_a_whole_training_run(tmp_path):
    names = [
        "transformers.modeling_flash_attention_utils",
        "transformers.masking_utils",
        "transformers.integrations.sdpa_attention",
        "transformers.models.llama.modeling_llama",
        "torch.nn.functional",
    ]
    model = tiny_llama("neat_varlen")
    trainer, _ = trainer_for(model, tmp_path)
    configure_packing_for_models([model])
    before = {name: dict(vars(sys.modules[name])) for name in names}
    trainer.train()
    for name, attributes in before.items():
        now = vars(sys.modules[name])
        assert attributes.keys() == now.keys(), name
        changed = [key for key, value in attributes.items() if now[key] is not value]
        assert not changed, (name, changed)


def test_another_collator_is_refused(tmp_path):
    model = tiny_llama("neat_varlen")
    trainer, _ = trainer_for(model, tmp_path, collator=DataCollatorWithFlattening())
    with pytest.raises(ContractError, match="DataCollatorWithFlattening"):
        trainer.train()


def test_a_key_changed_after_the_collator_was_built_is_refused(tmp_path):
    model = tiny_llama("neat_varlen")
    trainer, _ = trainer_for(model, tmp_path)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ContractError, match=r"(?s)varlen.*bool_4d.*sdpa_mask"):
        trainer.train()


def test_a_reloaded_model_is_back_on_its_default_and_is_refused(tmp_path):
    model = tiny_llama("neat_varlen")
    collator = DataCollatorForNeatPacking(model)
    model.save_pretrained(tmp_path / "saved")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    trainer, _ = trainer_for(again, tmp_path, collator=collator)
    with pytest.raises(ContractError, match="reloaded"):
        trainer.train()


def test_the_default_collator_is_refused_for_a_model_that_reads_masks():
    require_same_layout(tiny_llama("neat_varlen"), DataCollatorForNeatPacking())
    with pytest.raises(ContractError, match="layout"):
        require_same_layout(tiny_llama("sdpa"), DataCollatorForNeatPacking())
    boolean = DataCollatorForNeatPacking(contract=PackingCapabilities("block_causal"))
    require_same_layout(tiny_llama("sdpa"), boolean)
    # Under eager a boolean mask is added to the scores and hides nothing.
    with pytest.raises(ContractError, match="additive_4d"):
        require_same_layout(tiny_llama("eager"), boolean)


def test_one_mask_for_a_model_with_windows_is_refused():
    config = Gemma3TextConfig(
        **GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention"], head_dim=8
    )
    model = build(Gemma3ForCausalLM, config, "sdpa")
    one = DataCollatorForNeatPacking(contract=PackingCapabilities("block_causal"))
    with pytest.raises(ContractError, match="mask_delivery"):
        require_same_layout(model, one)


def test_another_first_position_is_refused():
    model = build(RobertaForMaskedLM, RobertaConfig(**SIZES), "neat_varlen")
    with pytest.raises(ContractError, match="position_ids_start: 0, 2"):
        require_same_layout(model, DataCollatorForNeatPacking(model, position_ids_start=0))


@pytest.mark.parametrize("option", ["dispatch_batches", "split_batches"])
def test_c57_batches_that_are_cut_by_rows_are_refused_by_name(option, tmp_path):
    model = tiny_llama("neat_varlen")
    data = Stream() if option == "dispatch_batches" else None
    trainer, _ = trainer_for(model, tmp_path, data=data, accelerator_config={option: True})
    with pytest.raises(ContractError, match=option):
        trainer.train()


def test_c57_the_default_of_iterable_datasets_is_caught_too(tmp_path):
    trainer, _ = trainer_for(tiny_llama("neat_varlen"), tmp_path, data=Stream())
    with pytest.raises(ContractError, match="dispatch_batches"):
        trainer.train()


def test_c57_data_parallel_is_refused_by_name():
    model = tiny_llama("neat_varlen")
    collator = DataCollatorForNeatPacking(model)
    arguments = SimpleNamespace(n_gpu=2)
    loader = torch.utils.data.DataLoader(rows(), collate_fn=collator)
    with pytest.raises(ContractError, match="DataParallel"):
        PackingCallback(skip_dry_run="LlamaForCausalLM").on_train_begin(
            arguments, None, None, model=model, train_dataloader=loader
        )
    configure_packing_for_models([model])
    PackingCallback(skip_dry_run="LlamaForCausalLM").on_train_begin(
        arguments, None, None, model=model, train_dataloader=loader
    )


@pytest.mark.parametrize("key", ["sdpa", "eager", "neat_varlen"])
def test_c57_rows_survive_slicing_and_joining_where_boundaries_have_rows(key):
    from accelerate.utils import concatenate
    from accelerate.utils.operations import slice_tensors

    model = tiny_llama(key).eval()
    configure_packing_for_models([model])
    collator = DataCollatorForNeatPacking(model, rows="packs", row_length=16)
    documents = rows()
    batch = collator([documents[:2], documents[2:4]])
    whole = model(**batch).logits
    for index in range(2):
        part = slice_tensors(batch, slice(index, index + 1))
        assert torch.equal(model(**part).logits, whole[index : index + 1])
    if key == "neat_varlen":
        # Plain ints cannot be joined, which accelerate says itself.
        with pytest.raises(TypeError, match="int"):
            concatenate([collator([documents[:2]]), collator([documents[2:4]])])
        return
    joined = concatenate([collator([documents[:2]]), collator([documents[2:4]])])
    assert torch.equal(model(**joined).logits, whole)


def test_c57_masks_per_layer_type_survive_slicing_and_joining():
    from accelerate.utils import concatenate
    from accelerate.utils.operations import slice_tensors

    config = Gemma3TextConfig(
        **GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention"], head_dim=8
    )
    model = build(Gemma3ForCausalLM, config, "eager").eval()
    collator = DataCollatorForNeatPacking(model, rows="packs", row_length=16)
    batch = collator([rows()[:2], rows()[2:4]])
    assert batch["attention_mask"].keys() == {"sliding_attention", "full_attention"}
    whole = model(**batch).logits
    for index in range(2):
        part = slice_tensors(batch, slice(index, index + 1))
        assert torch.equal(model(**part).logits, whole[index : index + 1])
    joined = concatenate([slice_tensors(batch, slice(0, 1)), slice_tensors(batch, slice(1, 2))])
    assert torch.equal(model(**joined).logits, whole)


@pytest.mark.parametrize("contract", ["flash_varlen", "document_ids"])
def test_c57_plain_ints_are_never_joined_across_processes(contract):
    model = tiny_llama("neat_varlen")
    if contract == "document_ids":
        model.packed_mask_type = contract
        model.requires_packed_sequence_metadata = True
    else:
        configure_packing_for_models([model])
    collator = DataCollatorForNeatPacking(model)
    loader = torch.utils.data.DataLoader(rows(), collate_fn=collator)
    accelerator = SimpleNamespace(dispatch_batches=True, split_batches=False)
    callback = PackingCallback(skip_dry_run="LlamaForCausalLM")

    def begin(world_size):
        arguments = SimpleNamespace(n_gpu=1, world_size=world_size, accelerator_config=accelerator)
        callback.on_train_begin(arguments, None, None, model=model, train_dataloader=loader)

    begin(1)
    with pytest.raises(ContractError, match="plain ints"):
        begin(2)


@pytest.mark.parametrize("key", ["sdpa", "eager", "neat_varlen"])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=4)),
        (MixtralForCausalLM, MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=4)),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(
                **GROUPED,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"],
                head_dim=8,
            ),
        ),
        (BertForMaskedLM, BertConfig(**SIZES)),
        (RobertaForMaskedLM, RobertaConfig(**SIZES)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)),
    ],
)
def test_families_that_keep_documents_apart_are_proven_to(model_class, config, key):
    model = build(model_class, copy.deepcopy(config), key)
    proof = prove_isolation(model, DataCollatorForNeatPacking(model))
    assert len(proof.layers) == 2
    assert all(layer.change_in_first > 0 for layer in proof.layers)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (BloomForCausalLM, BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
        (OpenAIGPTLMHeadModel, OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)),
    ],
)
def test_an_architecture_that_stores_the_key_and_never_calls_it_is_caught(model_class, config):
    model = build(model_class, config, "neat_varlen")
    assert model.config._attn_implementation == "neat_varlen"
    with pytest.raises(UnsupportedModelError, match=rf"{model_class.__name__}.*layer.*0"):
        prove_isolation(model, DataCollatorForNeatPacking(model))


def test_a_recurrent_state_that_crosses_documents_is_caught():
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    model = build(MambaForCausalLM, config, "neat_varlen")
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        prove_isolation(model, DataCollatorForNeatPacking(model))


def test_c28_a_head_that_pools_over_the_row_is_named():
    config = tiny_llama("sdpa").config
    model = build(LlamaForSequenceClassification, config, "neat_varlen")
    with pytest.raises(UnsupportedModelError, match=r"LlamaForSequenceClassification.*pools"):
        prove_isolation(model, DataCollatorForNeatPacking(model))


def test_a_model_whose_positions_count_through_the_row_is_caught():
    class OwnPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            positions = torch.arange(input_ids.shape[1])[None]
            return super().forward(input_ids=input_ids, position_ids=positions**2, **kwargs)

    config = tiny_llama("sdpa").config
    model = build(OwnPositions, config, "neat_varlen")
    with pytest.raises(UnsupportedModelError, match="positions"):
        prove_isolation(model, DataCollatorForNeatPacking(model))


def test_a_collator_that_leaves_the_boundaries_out_is_caught_by_the_dry_run():
    class Forgetful(DataCollatorForNeatPacking):
        def _boundaries(self, packed):
            return {}

    model = tiny_llama("neat_varlen")
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn"):
        prove_isolation(model, Forgetful(model, return_position_ids=False))


def test_a_forward_that_fails_on_a_packed_row_says_so_with_the_cause():
    class Fragile(LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            raise KeyError("neat_varlen")

    model = build(Fragile, tiny_llama("sdpa").config, "neat_varlen")
    with pytest.raises(UnsupportedModelError, match=r"Fragile.*KeyError") as caught:
        prove_isolation(model, DataCollatorForNeatPacking(model))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_dry_run_leaves_no_trace():
    model = tiny_llama("neat_varlen").train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    collator = DataCollatorForNeatPacking(model, row_length=64)
    prove_isolation(model, collator)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert collator.row_length == 64
    assert not any(module._forward_hooks for _, module in attention_layers(model))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("key", ["eager", "neat_varlen"])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (BloomForCausalLM, BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
        (MambaForCausalLM, MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)),
    ],
)
def test_a_model_that_hooks_keep_apart_is_proven_until_they_come_off(model_class, config, key):
    model = build(model_class, copy.deepcopy(config), key)
    with isolate(model):
        # Hooks may change what the model reads, so the collator is built after them.
        collator = DataCollatorForNeatPacking(model)
        require_same_layout(model, collator)
        assert prove_isolation(model, collator).change_in_second == 0
    with pytest.raises(UnsupportedModelError, match=model_class.__name__):
        prove_isolation(model, collator)
