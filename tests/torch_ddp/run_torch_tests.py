"""Runs torch's own tests of DistributedDataParallel, each on new ranks (processes, Gloo), and prints a line of JSON for
each: its name, "passed", "skipped" or "failed", calls of the hook on rank 0, seconds, and the last lines of an error.

usage: run_torch_tests.py METHOD [TEST ...]    METHOD: a key of EXACT in tests/methods.py, or "stock", without a hook
"""

import json
import multiprocessing
import os
import sys
import time
import unittest
from types import CodeType
from typing import Any

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": os.environ.get("WS", "4"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import shim  # noqa: E402
import torch  # noqa: E402
from methods import EXACT  # noqa: E402

shim.replace_cuda()
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

#: Seconds for a test, and for a collective of it.
TEST_TIMEOUT, COLLECTIVE_TIMEOUT = 90, 30
CALLS = multiprocessing.Value("q")


class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's harness, with forked ranks: this process has imported all that they need."""

    method = "stock"

    def setUp(self) -> None:
        super().setUp()
        CALLS.value = 0
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        processes = self.processes
        super().tearDown()
        for process in processes:
            process.join(5)
            process.kill()

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        super()._barrier(*args, **{"timeout": COLLECTIVE_TIMEOUT, **kwargs})

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        def called() -> None:
            CALLS.value += rank == 0

        shim.replace_ddp(EXACT.get(cls.method), called)
        with shim.CpuForCuda():
            super()._run(rank, test_name, file_name, pipe, **kwargs)


def names_in(code: CodeType) -> set[str]:
    """The names that a function and those defined in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


def uses_ddp(function: Any, seen: set[str]) -> bool:
    """Whether a method of the tests makes a DistributedDataParallel, itself or by another method."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    names = names_in(function.__code__)
    if "DistributedDataParallel" in names:
        return True
    base = vars(distributed_test.DistributedTest._DistTestBase)
    others = [name for name in names if callable(base.get(name)) and name not in seen]
    return any(uses_ddp(base[name], seen | set(others)) for name in others)


def ddp_tests() -> list[str]:
    """All tests that make a DistributedDataParallel."""
    base = vars(distributed_test.DistributedTest._DistTestBase)
    return [name for name in base if name.startswith("test_") and uses_ddp(base[name], {name})]


def main(method: str, *names: str) -> None:
    Tests.method = method
    distributed_test.default_pg_timeout = COLLECTIVE_TIMEOUT
    common_distributed.TIMEOUT_DEFAULT = TEST_TIMEOUT
    common_distributed.TIMEOUT_OVERRIDE.clear()
    torch.set_num_threads(1)
    for name in names or ddp_tests():
        result = unittest.TestResult()
        begin = time.monotonic()
        Tests(name).run(result)
        problems = [text for _, text in result.errors + result.failures]
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        seconds = time.monotonic() - begin
        problems += [reason for _, reason in result.skipped]
        line = {"test": name, "outcome": outcome, "calls": CALLS.value, "seconds": round(seconds, 1)}
        print(json.dumps({**line, "error": "\n".join(problems)[-3000:]}), file=REPORT, flush=True)


if __name__ == "__main__":
    REPORT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(*sys.argv[1:])
