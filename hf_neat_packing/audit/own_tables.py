"""Classes that know attention keys by a table of their own, which no registration reaches."""

import sys

import transformers


def reason_of_own_table(architecture: str, attention: str) -> str:
    """Say why a class raises a bare `KeyError` for an attention key, and with which keys it loads.

    A few classes of transformers (falcon, git, gpt_neo) pick their attention from a table of their own when
    they are built, where nothing that is registered can reach.

    Args:
        architecture: name of the class in transformers.
        attention: the key that its table has not.
    """
    keys = sorted(_own_tables(architecture))
    write = " or ".join(f"attn_implementation={key!r}" for key in keys) or "another key"
    return (
        f"{architecture or 'its class'} picks attention from a table of its own, which has no {attention!r}. Write "
        f"{write} in `from_pretrained`; the collator follows, and `isolate(model)` keeps documents apart where the "
        "model does not."
    )


def _own_tables(architecture: str) -> set[str]:
    """Collect the keys of a modelling module's tables of attention classes that need no further package."""
    module = sys.modules.get(getattr(getattr(transformers, architecture, None), "__module__", ""))
    tables = [
        value
        for name, value in (vars(module) if module is not None else {}).items()
        if name.endswith("ATTENTION_CLASSES") and isinstance(value, dict)
    ]
    return {key for table in tables for key in table if not str(key).startswith("flash")}
