"""What the demonstration draws fits a terminal of 80 columns and shows what happened."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hf_neat_packing.demo.exactness import Isolation
from hf_neat_packing.demo.pictures import block_diagonal, picture_of, sparkline, strip
from hf_neat_packing.demo.run import Checked, Compared, Planned, Said, Saved
from hf_neat_packing.demo.throughput import Speed
from hf_neat_packing.demo.training import Training
from hf_neat_packing.planning import plan_packing

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=70)
CLEAN = Isolation(documents=3, tokens=9, logits_moved=0.0, gradient_leaked=0.0)
LEAKY = Isolation(documents=3, tokens=9, logits_moved=1.5, gradient_leaked=2e-5)


def drawn(event) -> str:
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(picture_of(event))
    return capture.get()


@given(lengths=LENGTHS, free=st.integers(0, 500))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_strip_gives_documents_their_share_of_the_pack(lengths, free):
    capacity = sum(lengths) + free
    text = strip(lengths, capacity).plain
    cells = text.replace("\n", "")
    assert len(cells) == 3 * 74
    assert max(len(line) for line in text.split("\n")) <= 76
    tokens_a_cell = capacity / len(cells)
    assert abs(cells.count("·") * tokens_a_cell - free) <= tokens_a_cell
    first = len(cells) - len(cells.lstrip("a"))
    assert abs(first * tokens_a_cell - lengths[0]) <= tokens_a_cell


@given(lengths=LENGTHS)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_the_square_is_dark_only_below_the_diagonal(lengths):
    lines = block_diagonal(lengths).plain.split("\n")
    assert [len(line) for line in lines] == [36] * 18
    for row, line in enumerate(lines):
        assert line[2 * row + 2 :].strip() == ""
        assert line[2 * row] in "█▀"


def test_one_document_fills_the_triangle_and_two_leave_a_block_free():
    assert block_diagonal([10]).plain.split("\n")[17][0] == "█"
    assert block_diagonal([10, 10]).plain.split("\n")[17][:18].strip() == ""


def test_a_sparkline_falls_with_the_loss():
    assert sparkline([8.0, 6.0, 4.0]) == "█▅▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(step) for step in range(1000)])) <= 60


def test_the_plan_shows_what_was_split_and_dropped():
    plan = plan_packing([5, 30, 9, 0, 12], 16, on_overlong="split")
    text = drawn(Planned(plan.report, (5, 9)))
    assert "5, 56 tokens, longest 30, 1 split, 1 dropped" in text
    assert f"{len(plan)} of 16 tokens" in text
    assert f"{plan.fill:.2%}" in text


@pytest.mark.parametrize(
    ("packed", "control", "verdict"),
    [
        (CLEAN, LEAKY, "Exact: no bit passes"),
        (LEAKY, LEAKY, "NOT EXACT"),
        (CLEAN, CLEAN, "proves nothing"),
    ],
)
def test_the_verdict_follows_the_pack_and_the_control(packed, control, verdict):
    text = drawn(Checked(packed, control))
    assert verdict in text
    assert sum(line in text for line in ("Exact:", "NOT EXACT", "proves nothing")) == 1


def test_a_model_that_comes_back_different_is_said_aloud(tmp_path):
    assert "bit for bit" in drawn(Saved(tmp_path, same_logits=True))
    assert "DIFFER" in drawn(Saved(tmp_path, same_logits=False))


def test_nothing_is_wider_than_80_columns():
    speeds = tuple(
        Speed(name, 1234567.8, 1234567890, 8.3187)
        for name in ("neat_varlen", "sdpa, packed", "sdpa, padded")
    )
    plan = plan_packing([4000] * 1000, 4096)
    events = [
        Said("Documents", "reading and tokenizing"),
        Said("", "15,315 functions"),
        Planned(plan.report, (4000,)),
        Training(losses=(8.0, 7.0, 5.0), seconds=70.0, tokens=163_840),
        Compared(speeds),
        Checked(CLEAN, LEAKY),
        Saved(Path("/a/folder"), same_logits=True),
    ]
    for event in events:
        assert max(len(line.rstrip()) for line in drawn(event).split("\n")) <= 80
    # A table that does not fit would have been cut with dots.
    assert "…" not in "".join(drawn(event) for event in events)
