"""The public surface is what `__all__` says, and every public name is documented."""

import inspect
import types

import hf_neat_packing
from hf_neat_packing import errors


def test_the_namespace_is_all():
    public = {
        name
        for name, value in vars(hf_neat_packing).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(hf_neat_packing.__all__)


def test_every_public_name_says_what_it_is():
    for name in hf_neat_packing.__all__:
        value = getattr(hf_neat_packing, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_errors_belong_to_the_families_that_users_catch():
    families = {"ValueError": ValueError, "RuntimeError": RuntimeError, "ImportError": ImportError}
    tree = errors.__doc__
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value is not errors.NeatPackingError:
            assert issubclass(value, errors.NeatPackingError)
            line = next(line for line in tree.splitlines() if name in line)
            assert any(word in line and issubclass(value, base) for word, base in families.items())
