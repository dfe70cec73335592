"""Pictures of plans: every token is drawn once, in the file, in the terminal and in the notebook."""

import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neat_packing.errors import MissingDependencyError, PlanningError
from hf_neat_packing.picture import picture_text, save_picture
from hf_neat_packing.planning import plan_packing
from hf_neat_packing.planning.shapes import (
    PALETTE,
    attention_share,
    chosen_packs,
    runs_of,
    shade_of,
    shade_ranges,
)

quick = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture
def plan():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 60), 4, 1500).astype(int)
    return plan_packing(lengths, 512, on_overlong="split")


@quick
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 30), st.integers(1, 50))
def test_every_token_of_a_pack_is_in_one_run(lengths, padding, resolution):
    capacity = max(sum(lengths) + padding, 1)
    pieces = [(document, 0, length) for document, length in enumerate(lengths)]
    runs = runs_of(pieces, capacity, resolution=resolution)
    assert sum(run.documents for run in runs) == len(lengths)
    places = [(run.start, run.length) for run in runs]
    assert [start for start, _ in places] == np.cumsum([0, *[n for _, n in places]])[:-1].tolist()
    assert sum(length for _, length in places) == capacity
    padded = [run.length for run in runs if run.documents == 0]
    assert sum(padded) == capacity - sum(lengths)
    for run in runs:
        if run.document >= 0:
            assert run.length == lengths[run.document]
        elif run.documents:
            assert run.documents > 1, "only neighbours too short to be seen are joined"


@quick
@given(st.integers(1, 5000), st.data())
def test_the_legend_names_the_shade_of_every_length(capacity, data):
    length = data.draw(st.integers(1, capacity))
    ranges = shade_ranges(capacity)
    shades = range(len(PALETTE) - len(ranges), len(PALETTE))
    named = [s for s, (low, high) in zip(shades, ranges, strict=True) if low <= length <= high]
    assert named == [shade_of(length, capacity)]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == capacity


def test_shown_packs_reach_from_the_first_to_the_last():
    assert chosen_packs(3, 10) == [0, 1, 2]
    assert chosen_packs(100, 4) == [0, 33, 66, 99]
    assert chosen_packs(0, 4) == []


def test_the_share_of_attention_is_the_squares_of_the_documents():
    assert attention_share([4], 4) == 1.0
    assert attention_share([2, 2], 4) == 0.5
    assert attention_share([1, 1], 4) == 0.125


def test_a_png_and_a_repeatable_svg_with_its_words(plan, tmp_path):
    pytest.importorskip("matplotlib")
    png = save_picture(plan, tmp_path / "plan.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    first = save_picture(plan, tmp_path / "a.svg").read_bytes()
    assert first == save_picture(plan, tmp_path / "b.svg").read_bytes()
    words = first.decode()
    assert f"{plan.num_documents} documents in {len(plan)} packs of 512 tokens" in words
    assert f"{plan.fill:.1%} full" in words
    assert "part of a split document" in words
    assert "who attends to whom" in words
    other = save_picture(plan, tmp_path / "c.svg", pack=-1, packs=3, causal=False).read_text()
    assert f"Pack {len(plan) - 1}: who attends to whom" in other


def test_a_picture_of_nothing_or_without_matplotlib_says_what_to_do(plan, tmp_path, monkeypatch):
    nothing = plan_packing([], 8)
    with pytest.raises(PlanningError, match="no packs"):
        save_picture(nothing, tmp_path / "x.png")
    with pytest.raises(IndexError):
        save_picture(plan, tmp_path / "x.png", pack=len(plan))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"hf-neat-packing\[plot\]"):
        save_picture(plan, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_the_terminal_shows_documents_by_their_share_and_padding_as_dots():
    lines = str(picture_text(plan_packing([4, 2, 5], 8, strategy="sequential"), width=16)).split(
        "\n"
    )
    assert lines == [
        "0 ████████▓▓▓▓····  75%  2 documents",
        "1 ██████████······  62%  1 documents",
        "2 of 2 packs of 8 tokens, 68.8% full",
    ]
    assert str(picture_text(plan_packing([], 8))) == "0 of 0 packs of 8 tokens, 0.0% full"


class _Bars(HTMLParser):
    """Collect the bars of each row, and check that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.titles, self.widths = [], [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        given = dict(attributes)
        if "title" in given:
            self.titles.append(given["title"])
            self.widths.append(float(re.match(r"width:([\d.]+)%", given["style"]).group(1)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_notebook_shows_the_plan_without_scripts(plan):
    html = plan._repr_html_()
    bars = _Bars()
    bars.feed(html)
    assert bars.open == []
    assert "<script" not in html
    shown = min(len(plan), 12)
    assert sum(bars.widths) == pytest.approx(100 * shown, abs=0.1)
    assert f"{plan.num_documents} documents in {len(plan)} packs of 512 tokens" in html
    assert any(title.endswith("a part of it") for title in bars.titles)
    assert "tokens of padding" in html or plan.fill == 1
    assert "0 documents in 0 packs" in plan_packing([], 8)._repr_html_()
