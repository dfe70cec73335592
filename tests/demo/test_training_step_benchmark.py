"""The benchmark of a training step compares what it says it compares."""

import runpy
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "training_step.py"


def test_the_three_ways_give_one_gradient_and_padding_computes_more():
    module = runpy.run_path(str(BENCHMARK))
    case = module["Case"](tokens=96, documents=10, spread=0.6)
    assert sum(module["heavy_tailed"](case, 0)) == 96
    seconds, computed, difference = module["measure"](case, 1)
    assert list(seconds) == ["neat_varlen", "sdpa, packed", "sdpa, padded"]
    assert computed["neat_varlen"] == computed["sdpa, packed"] == 96 < computed["sdpa, padded"]
    assert 0 <= difference < 1e-3
