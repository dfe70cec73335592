"""Real documents without a download: the functions of the running interpreter's standard library."""

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from hf_neat_packing.errors import ColumnError

# Tests repeat themselves by the thousand, and installed packages are not the standard library.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def stdlib_functions(folder: Path | None = None) -> list[str]:
    """Collect the source text of every function and method, each text once.

    Args:
        folder: The library to read; the running interpreter's own by default.

    Returns:
        One text a function, decorators and comments included, less the indentation that all its
        lines share, in the order of file names and lines.

    Raises:
        ColumnError: If there is no function to be found.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            found.update(dict.fromkeys(_functions(path)))
    if not found:
        raise ColumnError(
            f"No Python function found under {root}: this interpreter comes without the source of "
            "its standard library, so there are no documents to pack. Pass your own: --data FILE."
        )
    return list(found)


def _functions(path: Path) -> list[str]:
    """Cut the functions out of one file; a file in another encoding or syntax has none."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Old files hold escapes that newer compilers warn of.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    # `splitlines` would also split at form feeds, which the compiler's line numbers do not count.
    lines = source.split("\n")
    texts = ("\n".join(lines[first - 1 : last]) for first, last in _spans(tree))
    return [textwrap.dedent(text) for text in texts]


def _spans(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Give first and last line of each function, outermost only: one inside it is its text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = [child.lineno, *(decorator.lineno for decorator in child.decorator_list)]
            yield min(lines), child.end_lineno or child.lineno
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _spans(child)
