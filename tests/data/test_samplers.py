"""Samplers: every rank the same number of batches, every document or pack once, or listed."""

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_neat_packing.dataset import pack_dataset
from hf_neat_packing.dataset.packed_dataset import RepeatedPack
from hf_neat_packing.dataset.packed_trainer import PackedTrainerMixin
from hf_neat_packing.dataset.samplers import RankBalancedPackSampler, TokenBudgetBatchSampler
from hf_neat_packing.errors import PlanningError
from hf_neat_packing.planning import imbalance, pack_costs, plan_packing


def ranks_of(kind, first, world, **keywords):
    return [kind(*first, num_ranks=world, rank=rank, **keywords) for rank in range(world)]


def flat(batches):
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_c58_seven_packs_give_every_rank_as_many_steps_and_no_empty_batch(world, drop_last):
    costs = np.arange(7) + 10
    samplers = ranks_of(RankBalancedPackSampler, (costs,), world, drop_last=drop_last)
    for epoch in range(3):
        steps = set()
        seen = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert all(batches)
            assert len(batches) == len(sampler)
            steps.add(len(batches))
            seen += flat(batches)
        assert steps == {7 // world if drop_last else -(-7 // world)}
        repeats, dropped = samplers[0].repeats, samplers[0].dropped
        assert all(s.repeats == repeats and s.dropped == dropped for s in samplers)
        assert sorted(seen) == sorted([*(set(range(7)) - set(dropped)), *repeats])
        assert len(repeats) == (0 if drop_last else -7 % world)
        marked = [pack for pack in seen if isinstance(pack, RepeatedPack)]
        assert sorted(marked) == sorted(repeats)
        assert len(dropped) == (7 % world if drop_last else 0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=60),
    world=st.integers(1, 5),
    strategy=st.sampled_from(["best_fit", "bfd", "sequential"]),
    drop_last=st.booleans(),
)
def test_c58_a_token_budget_gives_each_document_once_and_ranks_equal_steps(
    lengths, world, strategy, drop_last
):
    if drop_last and len(lengths) < world:
        with pytest.raises(PlanningError, match="fewer packs than the"):
            ranks_of(TokenBudgetBatchSampler, (lengths, 10), world, drop_last=True)
        return
    keywords = {"strategy": strategy, "drop_last": drop_last}
    samplers = ranks_of(TokenBudgetBatchSampler, (lengths, 10), world, **keywords)
    promised = len(samplers[0])
    for epoch in range(3):
        seen = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(batches) == len(sampler) == promised
            assert all(batches)
            assert all(sum(lengths[i] for i in batch) <= 10 for batch in batches)
            seen += flat(batches)
        repeats, dropped = samplers[0].repeats, samplers[0].dropped
        assert sorted(seen + dropped) == sorted([*range(len(lengths)), *repeats])
        if len(lengths) >= promised * world:
            assert repeats == dropped == []


def test_packs_are_divided_rather_than_repeated_or_dropped():
    samplers = ranks_of(TokenBudgetBatchSampler, ([2] * 20, 8), 4)
    assert [len(list(sampler)) for sampler in samplers] == [2] * 4
    assert samplers[0].repeats == []
    alone = ranks_of(TokenBudgetBatchSampler, ([8] * 7, 8), 2)
    assert [len(sampler) for sampler in alone] == [4, 4]
    assert len(alone[0].repeats) == 1


def test_each_epoch_has_another_plan_of_the_same_length():
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    sampler = TokenBudgetBatchSampler(lengths, 1000, seed=5)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    assert len(first) == len(second)
    same = set(map(tuple, second)) & set(map(tuple, TokenBudgetBatchSampler(lengths, 1000, seed=6)))
    assert len(same) > 0.9 * len(second), "all but a few packs are those of the best-fit plan"
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == first


def test_a_token_budget_does_not_cut_and_says_so():
    with pytest.raises(PlanningError, match="pack_dataset"):
        TokenBudgetBatchSampler([5], 4, on_overlong="truncate")
    with pytest.raises(PlanningError, match="document 0 has 5 tokens"):
        TokenBudgetBatchSampler([5], 4)
    assert list(TokenBudgetBatchSampler([5, 3], 4, on_overlong="drop")) == [[1]]
    with pytest.raises(PlanningError, match="rank=2"):
        TokenBudgetBatchSampler([3], 4, num_ranks=2, rank=2)


def test_ranks_wait_at_most_a_third_as_long_as_in_a_random_order():
    draw = np.random.default_rng(0).lognormal(np.log(350), 1.0, 40_000)
    plan = plan_packing(np.clip(draw, 8, 4096).astype(int), 4096)
    costs = pack_costs(plan.lengths, plan.offsets)
    samplers = ranks_of(RankBalancedPackSampler, (costs,), 8, batches_per_update=8, drop_last=True)
    dealt = np.array([flat(sampler) for sampler in samplers]).T.ravel()
    random = np.random.default_rng(1).permutation(len(plan))
    assert imbalance(costs[dealt], 8) <= imbalance(costs[random], 8) / 3


def test_an_update_sees_a_random_draw_of_packs_and_not_like_costs():
    costs = np.arange(640)
    (sampler,) = ranks_of(RankBalancedPackSampler, (costs,), 1, batch_size=2, batches_per_update=4)
    batches = list(sampler)
    assert {len(batch) for batch in batches} == {2}
    update = np.array(batches[:4]).ravel()
    assert costs[update].std() > costs.std() / 2


def test_a_repeated_pack_has_no_labels_to_learn_from():
    rows = {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]], "shift_labels": [[0, 0]] * 2}
    for kept in (rows, {"input_ids": rows["input_ids"]}):
        view = pack_dataset(Dataset.from_dict(kept), max_length=2)
        batch = view.__getitems__([0, RepeatedPack(1)])
        assert batch[0]["labels"][0].tolist() == batch[0]["input_ids"][0].tolist()
        for name in {"labels", "shift_labels"} & set(kept) | {"labels"}:
            assert batch[1][name][0].tolist() == [-100, -100]
        assert batch[1]["input_ids"][0].tolist() == view[1]["input_ids"][0].tolist()
    classes = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [5, 6]})
    view = pack_dataset(classes, max_length=4)
    assert view[RepeatedPack(0)]["labels"] == [-100, -100]


@pytest.mark.parametrize("kind", ["budget", "balanced"])
def test_a_sampler_resumes_by_state_twice(kind):
    lengths = np.random.default_rng(0).integers(1, 50, 300)

    def make(seed=0):
        if kind == "budget":
            return TokenBudgetBatchSampler(lengths, 100, num_ranks=2, rank=1, seed=seed)
        return RankBalancedPackSampler(lengths, num_ranks=2, rank=1, batch_size=3, seed=seed)

    whole = make()
    whole.set_epoch(3)
    found, state = [], None
    for stop in (4, 9, None):
        sampler = make()
        if state is None:
            sampler.set_epoch(3)
        else:
            sampler.load_state_dict(state)
        for batch in sampler:
            found.append(batch)
            if stop is not None and len(found) % stop == 0:
                break
        state = sampler.state_dict()
    assert found == list(whole)
    with pytest.raises(PlanningError, match="its batches would not be the same"):
        make(seed=1).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_batches_and_a_stateful_one_resumes(workers):
    rows = [[i] * n for i, n in enumerate(np.random.default_rng(0).integers(1, 9, 60).tolist())]
    dataset = Dataset.from_dict({"input_ids": rows})
    lengths = [len(row) for row in rows]

    def make(loader):
        sampler = TokenBudgetBatchSampler(lengths, 16)
        return loader(dataset, batch_sampler=sampler, collate_fn=list, num_workers=workers)

    whole = list(make(DataLoader))
    assert sorted(d["input_ids"] for batch in whole for d in batch) == sorted(rows)
    assert list(make(StatefulDataLoader)) == whole
    loader = make(StatefulDataLoader)
    batches = iter(loader)
    first = [next(batches) for _ in range(3)]
    again = make(StatefulDataLoader)
    again.load_state_dict(loader.state_dict())
    assert first + list(again) == whole


class Recorder:
    """Flatten packs into one row, and keep what was read."""

    def __init__(self):
        self.seen = []

    def __call__(self, packs):
        documents = [ids for pack in packs for ids in pack["input_ids"]]
        self.seen.append([ids.tolist() for ids in documents])
        ids = torch.from_numpy(np.concatenate(documents)).long()[None]
        positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


class PackedTrainer(PackedTrainerMixin, Trainer):
    pass


def train(tmp_path, view, resume=None, **more):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    recorder = Recorder()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )
    trainer = PackedTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=view,
        data_collator=recorder,
    )
    trainer.train(resume_from_checkpoint=resume)
    return recorder.seen, trainer


def test_the_trainer_reads_balanced_batches_in_new_order_each_epoch_and_resumes(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 64, n).tolist() for n in rng.integers(1, 30, 60)]
    view = pack_dataset(Dataset.from_dict({"input_ids": rows}), max_length=32)
    seen, trainer = train(tmp_path / "a", view, num_train_epochs=2)
    sampler = RankBalancedPackSampler(
        view, num_ranks=1, rank=0, batch_size=2, hidden_size=16, seed=42
    )
    steps = len(sampler)
    assert trainer.state.global_step == len(seen) == 2 * steps
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected = [[ids.tolist() for p in b for ids in view[p]["input_ids"]] for b in sampler]
        assert seen[epoch * steps : (epoch + 1) * steps] == expected
    stopped = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": steps + 2}
    train(tmp_path / "b", view, **stopped)
    checkpoint = tmp_path / "b" / f"checkpoint-{steps + 2}"
    rest, _ = train(tmp_path / "b", view, resume=str(checkpoint), num_train_epochs=2)
    assert rest == seen[steps + 2 :]


def test_without_a_packed_set_the_trainer_keeps_its_own_loader(tmp_path):
    nested = Dataset.from_dict({"input_ids": [[[1, 2], [3]]] * 4}).with_format("numpy")
    assert isinstance(nested, datasets.Dataset)
    seen, trainer = train(tmp_path, nested, num_train_epochs=1)
    assert len(seen) == 2
    assert trainer.get_train_batch_sampler() is None
