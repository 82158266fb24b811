"""Every command of the experiments and the lab starts by its path, as the docs print it."""

import sys
from pathlib import Path

import pytest
from launch import ROOT, finish, start

# It is called by mpirun, in the place of ssh.
NOT_FOR_USERS = {"netlab_gloo.py"}
FILES = [path for room in ("lab", "experiments") for path in sorted((ROOT / "scripts" / room).glob("*.py"))]
COMMANDS = [path for path in FILES if "__main__" in path.read_text()]  # others are for these to import


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_help(path: Path) -> None:
    if path.name in NOT_FOR_USERS:
        pytest.skip("has no options")
    process = start([sys.executable, str(path), "--help"], PYTHONPATH=str(ROOT))
    assert "usage" in finish(process, 120) and process.returncode == 0
