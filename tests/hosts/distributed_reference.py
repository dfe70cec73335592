"""What a training run gives in ONE process on unpacked documents, and how far another may be from it."""

import copy

import datasets
import torch
import torch.nn.functional as F

from hf_neat_packing import pack_dataset
from hf_neat_packing.dataset.packed_dataset import RepeatedPack
from hf_neat_packing.dataset.samplers import RankBalancedPackSampler

LENGTHS = [9, 2, 17, 5, 3, 8, 12, 1, 6, 4, 15, 7, 2, 11, 5, 10, 3, 6, 14, 2]
ROW = 32
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BOUNDARIES += ("_packed_seq_ids", "position_ids", "seq_idx")


def packs():
    """Documents of every length, packed: an odd number of packs, so that one rank repeats one."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": ids}), max_length=ROW)
    assert len(packed) % 2 == 1
    return packed


def samplers(packed, ranks, seed=0):
    return [
        RankBalancedPackSampler(packed, num_ranks=ranks, rank=rank, hidden_size=32, seed=seed)
        for rank in range(ranks)
    ]


def documents_of_steps(packed, ranks, seed=0):
    """The documents that all ranks together learn from in each step, each document once."""
    return [
        [
            torch.tensor(document.tolist())
            for batch in batches
            for pack in batch
            if not isinstance(pack, RepeatedPack)
            for document in packed[pack]["input_ids"]
        ]
        for batches in zip(*samplers(packed, ranks, seed), strict=True)
    ]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_alone(model, steps, dtype=torch.float32, *, targets=None, optimizer_of=optimizer_of):
    """Train on documents one by one: a step's gradient is of the mean over all its targets.

    Args:
        model: the starting point, which stays as it is.
        steps: the documents of each step.
        dtype: of weights and gradients.
        targets: divides the loss of every step; None: the step's own targets.
        optimizer_of: makes the optimizer of a model.

    Returns:
        The weights after the last step, and the loss of each step.
    """
    model = copy.deepcopy(model).to(dtype)
    optimizer, losses = optimizer_of(model), []
    for documents in steps:
        divisor = targets or sum(len(ids) - 1 for ids in documents)
        total = 0.0
        for ids in documents:
            if len(ids) > 1:
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                loss = F.cross_entropy(logits, ids[1:], reduction="sum") / divisor
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return weights_of(model), losses


def whole(value):
    """A tensor gathered from its shards, in float64."""
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.double().clone()


def weights_of(model):
    """Whole weights by name."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


class OneProcess:
    """One process on unpacked documents, in the dtype of the model and in float64.

    Args:
        model: the starting point.
        steps: the documents of each step.
        **options: of `train_alone`.
    """

    def __init__(self, model, steps, **options):
        self.start = weights_of(model)
        self.tokens = sum(len(ids) for documents in steps for ids in documents)
        self.same, self.losses = train_alone(model, steps, **options)
        self.truth, self.true_losses = train_alone(model, steps, torch.float64, **options)

    def excess(self, weights):
        """How far other weights are from float64, in units of what is allowed; equal: at most 1.

        Allowed is twice the error of the same dtype in one process, and the rounding of a sum over
        all tokens in another order (Higham 2002, section 4.2), relative to how far weights moved.
        """
        assert weights
        moved = max((self.truth[name] - self.start[name]).norm() for name in weights)
        # A step adds to a weight, which rounds it by its own size.
        band = self.tokens * torch.finfo(torch.float32).eps / 2 * moved
        worst = 0.0
        for name, value in weights.items():
            rounding = torch.finfo(torch.float32).eps * self.start[name].norm()
            allowed = 2 * (self.same[name] - self.truth[name]).norm() + band + rounding
            worst = max(worst, float((value - self.truth[name]).norm() / allowed))
        return worst

    def loss_excess(self, losses):
        """The same for the losses of all steps."""
        assert len(losses) == len(self.true_losses)
        worst = 0.0
        for found, same, true in zip(losses, self.losses, self.true_losses, strict=True):
            band = self.tokens * torch.finfo(torch.float32).eps / 2 * abs(true)
            worst = max(worst, abs(found - true) / (2 * abs(same - true) + band))
        return worst
