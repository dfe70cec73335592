"""`hf-neat-packing plan --picture`: a picture beside the report, and a form that cannot be drawn."""

from typer.testing import CliRunner

from hf_neat_packing.cli import app


def test_a_plan_is_drawn_where_a_picture_is_asked_for(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n500\n40\n1200\n900\n")
    command = ["plan", str(lengths), "--max-length", "2048", "--picture"]
    drawn = CliRunner().invoke(app, [*command, str(tmp_path / "plan.svg")])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "plan.bmp")])
    assert refused.exit_code == 2
    assert ".svg" in refused.output
    assert not (tmp_path / "plan.bmp").exists()
