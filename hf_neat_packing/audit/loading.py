"""Loading the model that an audit is asked for."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from ..errors import UnsupportedModelError
from .own_tables import reason_of_own_table
from .zoo import model_types, tiny_model


def load_model(name: str, attention: str) -> nn.Module:
    """Load a model: a tiny one where the name is a type of the zoo and no folder of that name is there.

    Args:
        name: a model type, a folder, or a model on the Hub.
        attention: attention key.

    Raises:
        UnsupportedModelError: a class that knows attention keys by a table of its own, without this one.
    """
    if name in model_types() and not Path(name).exists():
        return tiny_model(name, attn_implementation=attention)
    config: Any = AutoConfig.from_pretrained(name)
    architecture = (getattr(config, "architectures", None) or [""])[0]
    auto: Any = (
        AutoModelForMaskedLM if architecture.endswith("ForMaskedLM") else AutoModelForCausalLM
    )
    try:
        return auto.from_pretrained(name, attn_implementation=attention)  # type: ignore[no-any-return]
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise UnsupportedModelError(
            f"{name} cannot be loaded with attn_implementation={attention!r}: "
            f"{reason_of_own_table(architecture, attention)}"
        ) from error
