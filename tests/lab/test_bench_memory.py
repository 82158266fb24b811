"""scripts/lab/bench_memory.py: `hvd-compress estimate` states what it measures, and its table is of its runs."""

from pathlib import Path

import bench_memory
import pytest

pytest.importorskip("typer", reason="the extra [cli] is not installed")

from hvd_compress.cli import kernels
from hvd_compress.cli.estimate import Model, memory
from hvd_compress.cli.methods import MEMORY, METHODS
from hvd_compress.cli.network import Network

RANKS, LAYER = 4, (1000, 1000)


@pytest.mark.parametrize("name", [name for name in bench_memory.KNOWN if name in METHODS])
def test_estimate_knows_the_memory_of_a_method(name):
    """What a bucket takes is most of all of a small network."""
    (found,) = bench_memory.measured([name], [4], [RANKS])
    model = Model([LAYER] * 4, 0.0)
    one = kernels.Kernels(model.shapes).measure(name, RANKS)
    estimated = memory(model, Network(1e9, 0.0), name, one, METHODS[name].local_steps) / model.compressed
    assert MEMORY[name][0] == pytest.approx(found["held"], rel=0.05), found
    assert estimated == pytest.approx(found["peak"], rel=0.35), found  # runs differ by a quarter


def test_the_table_is_of_the_runs():
    folder = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory"
    runs = bench_memory.read_runs(folder / "runs.jsonl")
    assert tuple(runs) == bench_memory.KNOWN
    assert bench_memory.page(row for run in runs.values() for row in run["rows"]) == (folder / "table.md").read_text()
