"""A model that is called with padded rows runs its layers on one packed row; classifiers answer once a document.

Preference, reward and reinforcement learning trainers make padded batches of their own and read per-token values at
padded places. Two hooks at the backbone let them be: in front, the rows are laid end to end without their padding;
behind, every token's values go back where the token was. Heads and losses see what they know.

Legend: `B` padded rows, `W` their width, `R` packed rows, `S` tokens in one, `N` documents, `D` hidden size.
"""

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..collator import DataCollatorForNeatPacking
from ..contract import DOCUMENT_MAP_KEY
from ..documents import get_seqlens_in_batch
from ..errors import ContractError, UnsupportedModelError
from ..wrappers import entry_module, unwrap
from .batches import pack_padded
from .places import Places, put_back
from .proof import prove_padding_free
from .reading import Reads, find_token_read, read_tokens

# What a classifier's own forward reads; everything else of a packed batch is for the backbone.
_FOR_THE_HEAD = frozenset(("labels", "return_dict", "num_items_in_batch"))


class _Waiting(NamedTuple):
    """A packed batch on its way past the head to the backbone."""

    backbone: nn.Module
    batch: dict[str, Any]
    places: Places


class _Running(NamedTuple):
    """A forward of a backbone; without places where its batch is left as it is."""

    backbone: nn.Module
    places: Places | None = None


# Innermost last; each thread and task has its own.
_running: ContextVar[tuple[_Running, ...]] = ContextVar("running", default=())
_waiting: ContextVar[_Waiting | None] = ContextVar("waiting", default=None)


class PaddingFree:
    """Hooks that let the layers of a model run on packed rows; they come off with `remove()` or at the end of a `with`.

    Attributes:
        model: the model inside its wrappers.
        backbone: the part that is run on packed rows.
        collator: writes packed rows for the model.
        reads: which token of a document a classifier's head reads; only these are handed to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = unwrap(model)
        self._entry = entry_module(model)
        self.backbone = _backbone(self.model)
        self.collator = DataCollatorForNeatPacking(model)
        self.reads: Reads = "every token"
        self._handles: list[RemovableHandle] = []
        self._parameters = tuple(inspect.signature(self.backbone.forward).parameters)

    def attach(self) -> None:
        """Put the hooks on the backbone, in front of all others."""
        self._handles += [
            self.backbone.register_forward_pre_hook(self._pack, with_kwargs=True, prepend=True),
            self.backbone.register_forward_hook(self._unpack, always_call=True),
        ]
        # A pooler inside the backbone reads a place of each row, so it gets padded rows.
        pooler = getattr(self.backbone, "pooler", None)
        if isinstance(pooler, nn.Module):
            self._handles.append(pooler.register_forward_pre_hook(self._put_back_for_pooler))

    def attach_to_head(self) -> None:
        """Let packed batches through to a head that answers once a row: each document is a row to it."""
        self._handles += [
            self._entry.register_forward_pre_hook(self._spread, with_kwargs=True, prepend=True),
            self._entry.register_forward_hook(self._forget, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> "PaddingFree":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _spread(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Show the head one padded row a document, and keep the packed batch for the backbone."""
        named = _by_name(tuple(inspect.signature(module.forward).parameters), args, kwargs)
        document_map = named.get(DOCUMENT_MAP_KEY)
        if document_map is None:
            return None
        if "input_ids" not in named:
            raise ContractError(
                f"{type(module).__name__} was called with packed rows of embeddings; its head finds the ends of "
                "documents by `input_ids`. Call it with ids."
            )
        head = {name: named.pop(name) for name in list(named) if _is_for_the_head(name)}
        ids, pad = named["input_ids"], _padding_token(self.model)
        lengths = get_seqlens_in_batch(document_map)
        if self.reads == "every token":
            padded = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
            places = Places(document_map != 0, padded)
        else:
            read = read_tokens(self.reads, document_map, ids, pad)
            places = Places(read, torch.ones_like(lengths, dtype=torch.bool)[:, None])
        head["input_ids"] = places.put_back(ids).masked_fill(~places.padded, pad)
        head["attention_mask"] = places.padded.long()
        _waiting.set(_Waiting(self.backbone, named, places))
        return (), head

    def _pack(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand the layers a packed row, and remember where its tokens go."""
        # Pushed first: the hook behind the backbone pops even where this one raises.
        _running.set((*_running.get(), _Running(module)))
        named = _by_name(self._parameters, args, kwargs)
        waiting = _waiting.get()
        if waiting is not None and waiting.backbone is module:
            _waiting.set(None)
            packed, places = waiting.batch, waiting.places
        elif self._is_padded(named):
            packed, places = self._packed(named)
        else:
            return None
        _running.set((*_running.get()[:-1], _Running(module, places)))
        kept = {n: v for n, v in named.items() if not isinstance(v, Tensor) and n not in packed}
        if "use_cache" in self._parameters:
            packed = packed | {"use_cache": False}
        return (), kept | packed

    def _is_padded(self, named: Mapping[str, Any]) -> bool:
        mask, ids = named.get("attention_mask"), named.get("input_ids")
        if DOCUMENT_MAP_KEY in named or not isinstance(mask, Tensor) or mask.ndim != 2:
            return False
        if named.get("use_cache") or any(
            named.get(name) is not None for name in ("cache", "past_key_values")
        ):
            return False
        if bool(mask.all()):
            return False
        if not isinstance(ids, Tensor):
            raise ContractError(
                f"{type(self.backbone).__name__} was called with padded rows of embeddings; only rows of `input_ids` "
                "are packed. Call it with ids, or take the hooks off with `remove()`."
            )
        return True

    def _packed(self, named: Mapping[str, Any]) -> tuple[dict[str, Any], Places]:
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        packed = pack_padded(tensors, self.collator)
        padded = tensors["attention_mask"].bool()
        return packed, Places(packed[DOCUMENT_MAP_KEY] != 0, padded)

    def _unpack(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the values of every token back where it was."""
        running = _running.get()
        if not running or running[-1].backbone is not module:
            return None
        _running.set(running[:-1])
        places = running[-1].places
        if places is None or output is None:
            return None
        if isinstance(output, Mapping):
            for name, value in output.items():
                output[name] = put_back(name, value, places)  # type: ignore[index]
            return output
        if isinstance(output, tuple):
            return tuple(put_back(str(i), value, places) for i, value in enumerate(output))
        return put_back("output", output, places)

    def _put_back_for_pooler(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        places = _running.get()[-1].places if _running.get() else None
        return None if places is None else (places.put_back(args[0]), *args[1:])

    def _forget(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _waiting.set(None)


def padding_free(model: nn.Module) -> PaddingFree:
    """Let every padded batch that a model is called with run packed, whatever trainer makes it.

    For trainers with a collator and losses of their own, such as TRL's DPOTrainer and RewardTrainer: the model is
    called with padded rows as before and answers for padded rows, but its layers see one packed row without padding,
    and positions that count from each row's first real token. Rows without padding, packed batches, and calls with a
    cache (generation) pass unchanged. Two padded batches are run and compared with each row alone first.

    Args:
        model: the built model, in any number of wrappers.

    Returns:
        The hooks.

    Raises:
        ContractError: an attention key whose form of boundaries is not known.
        UnsupportedModelError: rows do not come out as alone. The model is then as it was.

    Example:
        >>> with padding_free(model):  # doctest: +SKIP
        ...     DPOTrainer(model, ...).train()
    """
    return _attached(model, classifier=False)


def pack_sequence_classifier(model: nn.Module) -> PaddingFree:
    """Let a sequence classifier or reward model take packed batches and answer once for each document.

    The layers run on the packed row. The head sees every document as a row of its own, so `logits` are `[N, labels]`
    in document order and the loss is the model's. A head that reads one token of a row (its end, its first) is
    found by its gradients and handed this token alone; another one gets all tokens, padded to the longest document.
    `DataCollatorForNeatPacking(model)` writes one label a document. Padded batches run packed too. With gradient
    accumulation use `per_label_loss`: the model's own loss is a mean over each batch.

    Args:
        model: the built classifier, in any number of wrappers.

    Returns:
        The hooks.

    Raises:
        ContractError: an attention key whose form of boundaries is not known, or no padding token.
        UnsupportedModelError: documents do not come out as alone. The model is then as it was.

    Example:
        >>> with pack_sequence_classifier(model):  # doctest: +SKIP
        ...     model(**DataCollatorForNeatPacking(model)(documents)).logits  # [documents, labels]
    """
    return _attached(model, classifier=True)


def _attached(model: nn.Module, *, classifier: bool) -> PaddingFree:
    hooks = PaddingFree(model)
    try:
        hooks.attach()
        if classifier:
            _require_padding_token(hooks.model)
            hooks.attach_to_head()
            hooks.reads = find_token_read(model, hooks.backbone, hooks.collator)
        prove_padding_free(model, hooks.collator if classifier else None)
    except BaseException:
        hooks.remove()
        raise
    return hooks


def _backbone(model: nn.Module) -> nn.Module:
    """The part of a model that ends in a vector per token: everything but the head."""
    backbone = getattr(model, "base_model", None)
    if not isinstance(backbone, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no `base_model`, so nothing says where its layers end and its head begins. "
            "Accepted: models of transformers, and your own that inherit PreTrainedModel and name their backbone in "
            "`base_model_prefix`."
        )
    return backbone


def _require_padding_token(model: Any) -> None:
    if _padding_token(model) is None:
        raise ContractError(
            f"The config of {type(model).__name__} has no pad_token_id, and heads of transformers answer for several "
            "rows only where it is set. Write `model.config.pad_token_id = tokenizer.pad_token_id`, or any id that "
            "ends no document."
        )


def _padding_token(model: Any) -> Any:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return getattr(text, "pad_token_id", None)


def _by_name(
    parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    named = dict(zip(parameters, args, strict=False)) | kwargs
    return {name: value for name, value in named.items() if value is not None}


def _is_for_the_head(name: str) -> bool:
    return name in _FOR_THE_HEAD or name.startswith("output_")
