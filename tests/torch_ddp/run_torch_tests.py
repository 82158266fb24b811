"""Runs torch's own tests of DistributedDataParallel, each on new ranks (processes with Gloo), with a compressor as the
hook of every model. Writes a line of JSON for each test: its name, its outcome ("passed", "skipped" or "failed"), the
calls of the hook on rank 0, seconds, and why it was skipped or has failed.

usage: run_torch_tests.py METHOD REPORT TEST ...
    METHOD    a key of EXACT in tests/methods.py, or "stock": no compressor
    REPORT    the file to write
    TEST      names; none: all but those in LONG
"""

import json
import multiprocessing
import os
import sys
import time
import unittest
from types import CodeType
from typing import Any

import shim
import torch
from methods import EXACT

distributed_test = shim.torch_tests()
METHODS_OF_TESTS = vars(distributed_test.DistributedTest._DistTestBase)

#: Seconds for a test, and for a collective in it. torch.compile takes 90 on a loaded machine.
TIMEOUT = 240
#: Takes more than 400 s here, without a compressor. It is of join(), which others test.
LONG = ("test_ddp_uneven_inputs",)

calls = multiprocessing.Value("q")


class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's own harness, except that ranks are forked, from this process that has imported all they need."""

    method = "stock"

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        ranks = self.processes
        super().tearDown()  # SIGTERM
        for rank in ranks:
            rank.join(5)
            rank.kill()

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        super()._barrier(*args, **{"timeout": TIMEOUT, **kwargs})

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        def called() -> None:
            if rank == 0:
                calls.value += 1

        shim.replace_ddp(EXACT.get(cls.method), called)
        with shim.CpuForCuda():
            super()._run(rank, *args, **kwargs)


def names_in(code: CodeType) -> set[str]:
    """The names that a function and the functions in it use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def uses_ddp(method: str, seen: set[str]) -> bool:
    """Whether a method of the tests makes a DistributedDataParallel, itself or by another of them."""
    function = METHODS_OF_TESTS[method]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    names = names_in(function.__code__)
    others = {name for name in names - seen if hasattr(METHODS_OF_TESTS.get(name), "__code__")}
    return "DistributedDataParallel" in names or any(uses_ddp(name, seen | others) for name in others)


def all_tests() -> list[str]:
    tests = [name for name in METHODS_OF_TESTS if name.startswith("test_") and name not in LONG]
    return [name for name in tests if uses_ddp(name, {name})]


def run(name: str) -> dict[str, Any]:
    result, begin, calls.value = unittest.TestResult(), time.monotonic(), 0
    Tests(name).run(result)
    problems = [text for _, text in result.errors + result.failures]
    outcome = "failed" if problems else "skipped" if result.skipped else "passed"
    return {
        "test": name,
        "outcome": outcome,
        "calls": calls.value,
        "seconds": round(time.monotonic() - begin, 1),
        "why": "\n".join(problems + [reason for _, reason in result.skipped]),
    }


def main(method: str, report: str, *names: str) -> None:
    assert method == "stock" or method in EXACT
    # One thread a rank, and no processes but the ranks.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)
    Tests.method, distributed_test.default_pg_timeout = method, TIMEOUT
    common = sys.modules["torch.testing._internal.common_distributed"]
    common.TIMEOUT_DEFAULT, common.TIMEOUT_OVERRIDE = TIMEOUT, {}
    with open(report, "w") as lines:
        for name in names or all_tests():
            print(name, flush=True)
            print(json.dumps(run(name)), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
