"""How many tokens each expert of a model gets, padding left out.

Transformers keeps the bias that balances experts without a loss (`e_score_correction_bias`) and never changes it: who
trains it counts the load of each expert. Counted by hand, a padding tail goes to experts too, and to the same ones in
every batch.

Legend: `B` rows, `S` tokens in a row, `T` = `B * S`, `K` experts of a token, `E` experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedModelError
from ..wrappers import forward_parameters, unwrap
from .routing import RoutingHooks, leave_padding_out_of_routing, routing_hooks

_CHOICE = "top_k_index"


class ExpertLoad:
    """Counts of tokens by expert since the last `reset`; `remove()` it, or use as a context manager.

    A forward that activation checkpointing repeats in the backward counts once.

    Attributes:
        counts: name of each module with experts -> int64 `[E]`.
    """

    def __init__(self, model: nn.Module, experts: dict[str, nn.Module]) -> None:
        self._had_hooks = routing_hooks(model) is not None
        self._routing: RoutingHooks = leave_padding_out_of_routing(model) or RoutingHooks(model)
        self._routing.counters += 1
        self._experts = experts
        self.counts: dict[str, Tensor] = {}
        self.reset()
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._counter(name), with_kwargs=True)
            for name, module in experts.items()
        ]

    def reset(self) -> None:
        """Begin to count from zero."""
        for name, module in self._experts.items():
            weight = next(module.parameters())
            number = getattr(module, "num_experts", weight.shape[0])
            self.counts[name] = torch.zeros(number, dtype=torch.int64, device=weight.device)

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._routing.counters -= 1
        if not self._had_hooks:
            self._routing.remove()

    def __enter__(self) -> "ExpertLoad":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _counter(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._routing.is_running():
                return
            place = list(forward_parameters(module) or {}).index(_CHOICE)
            chosen: Tensor = kwargs[_CHOICE] if _CHOICE in kwargs else args[place]
            real = self._routing.real_tokens()
            if real is not None:
                if chosen.shape[0] != real.numel():
                    raise UnsupportedModelError(
                        f"{type(module).__name__} chose experts for {chosen.shape[0]} tokens of {real.numel()}, so "
                        "padding cannot be told from text in its load. Accepted: one choice per token of the batch."
                    )
                chosen = chosen[real.flatten().to(chosen.device)]
            # An index past the last one stands for no expert.
            counts = self.counts[name]
            load = torch.bincount(chosen.flatten(), minlength=len(counts))
            counts += load[: len(counts)].to(counts.device)

        return count


def count_expert_load(model: nn.Module) -> ExpertLoad:
    """Count the tokens that each expert gets in the forwards of a model, padding left out.

    Args:
        model: the model, in any number of wrappers.

    Returns:
        The counts, which go on until they are removed.

    Raises:
        UnsupportedModelError: no module that is told which experts each token goes to.

    Example:
        >>> with count_expert_load(model) as load:  # doctest: +SKIP
        ...     model(**batch)
        ...     for name, counts in load.counts.items():
        ...         print(name, counts / counts.sum())
    """
    inner = unwrap(model)
    found = {
        name: module
        for name, module in inner.named_modules()
        if _CHOICE in (forward_parameters(module) or {})
    }
    if not found:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no module whose forward takes `{_CHOICE}`, so the tokens of its experts "
            "cannot be counted here. Accepted: models whose experts are told their tokens, as transformers' are."
        )
    return ExpertLoad(inner, found)
