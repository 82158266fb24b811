"""Allgathers and alltoalls of Gloo as messages from each rank to each other one."""

from pathlib import Path

import pytest
from launch import fork

RANKS = str(Path(__file__).with_name("direct_ranks.py"))
TOGETHER = [
    *("results", "between_collectives_of_the_program", "subgroups", "dropped_handles", "late_ranks", "answers"),
    *("ranks_in_different_calls", "sums", "end"),
]


@pytest.mark.parametrize("cases", [TOGETHER, ("lost_rank",)], ids=lambda cases: cases[-1])
def test_on_four_ranks(cases):
    names = [f"test_{case}" for case in cases]
    output = fork("4", "torch,pytest,hvd_compress", RANKS, names, timeout=120)
    for name in names:
        assert output.count(f"{name} ok") >= (3 if name == "test_lost_rank" else 4), output[-3000:]
