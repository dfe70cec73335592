"""Model cards from measured results: one for each family of the most used types, and an index of all.

Nothing on a card is written by hand: results in, Markdown out, and `stale_cards` compares.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2

from .card_values import Result, card_file, card_values, index_values
from .gpu_tables import gpu_tables

CARDS: Final = Path("model_cards")

_MOST_USED = """
llama llama4_text mistral ministral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
qwen3_5_text qwen3_5_moe_text gemma gemma2 gemma3_text gemma3n_text gemma4_text phi phi3 phimoe
gpt2 gpt_neo gpt_neox gptj gpt_bigcode gpt_oss opt bloom falcon mpt olmo olmo2 olmo3 olmoe
olmo_hybrid deepseek_v2 deepseek_v3 deepseek_v4 glm glm4 glm4_moe cohere cohere2 starcoder2
stablelm granite granitemoe granitemoehybrid smollm3 exaone4 ernie4_5 hunyuan_v1_dense nemotron
nemotron_h mamba mamba2 falcon_mamba falcon_h1 bamba jamba zamba2 lfm2 lfm2_moe recurrent_gemma
rwkv xlstm minimax minimax_m2 kimi_linear bert:masked roberta:masked modernbert:masked
distilbert:masked electra:masked
"""

MOST_USED: Final = tuple(_MOST_USED.split())
"""Types whose families have a card."""


def render_cards(results: Iterable[Result], gpu: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Render every card and the index.

    Args:
        results: lines of a zoo run.
        gpu: a report of `benchmarks/gpu_check.py`, where a card was measured.

    Returns:
        File name -> Markdown, `README.md` being the index.
    """
    results = list(results)
    known = {result["model_type"]: result for result in results}
    families = {known[name]["family"] for name in MOST_USED if name in known}
    pages = {}
    for family in sorted(families):
        members = [result for result in results if result["family"] == family]
        pages[card_file(family)] = _render("card.md.jinja", **card_values(family, members))
    pages["README.md"] = _render(
        "index.md.jinja", gpu=gpu and gpu_tables(gpu), **index_values(results, families)
    )
    return pages


def write_cards(
    results: Iterable[Result], directory: Path = CARDS, gpu: Mapping[str, Any] | None = None
) -> list[Path]:
    """Write every card and the index; pages of families that are gone are removed.

    Args:
        results: lines of a zoo run.
        directory: where the pages lie.
        gpu: as for `render_cards`.

    Returns:
        The files that changed.
    """
    pages = render_cards(results, gpu)
    changed = stale_cards(pages, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path in changed:
        if path.name in pages:
            path.write_text(pages[path.name])
        else:
            path.unlink()
    return changed


def stale_cards(pages: Mapping[str, str], directory: Path = CARDS) -> list[Path]:
    """List the pages that differ from what their results say, are missing, or should not be there."""
    there = {path.name for path in directory.glob("*.md")}
    differing = {
        name
        for name, text in pages.items()
        if name not in there or (directory / name).read_text() != text
    }
    return sorted(directory / name for name in differing | (there - set(pages)))


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_neat_packing.audit", "."),
        autoescape=False,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(**values)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
