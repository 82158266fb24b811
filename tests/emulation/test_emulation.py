"""The operators' tests with the CUDA kernels on an emulated GPU: see emulator.cpp and races.cpp.

What this cannot show: nvcc's code, the device's half and bfloat16 conversions, streams, NCCL, speed.
"""

import subprocess
import sys

import pytest
from emulation.build import ADDRESS, HERE, RACES, Variant, missing
from launch import finish, start

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
#: Operators' tests that do not depend on the kernels.
ELSEWHERE = ["test_instruction_sets.py", "test_load.py"]
#: Wrong tables have groups that overlap, which are races.
TABLES = "test_tables.py"


def run_tests(variant: Variant, timeout: float, *files: str, **environment: str) -> None:
    """Runs the operators' tests, or some files of them, with this build."""
    command = [sys.executable, "-m", "pytest", "-p", "emulated", "-p", "no:cacheprovider", "-x", "-k", "not opcheck"]
    ignored = [*ELSEWHERE, TABLES] if variant.sanitizer == RACES else ELSEWHERE
    command += [f"--ignore=tests/operators/{name}" for name in ignored]
    command += [f"tests/operators/{name}" for name in files] or ["tests/operators"]
    environment |= {"OPERATORS": str(variant.build()), "PYTHONPATH": str(HERE)}
    if variant.arch is not None:
        environment["EMULATED_ARCH"] = str(variant.arch)
        command.append(str(HERE / "launches.py"))
    process = start(command, **environment)
    output = finish(process, timeout)
    assert process.returncode == 0, output[-6000:]


def test_kernels_have_no_races() -> None:
    """The code for sm_80, threads in shuffled order."""
    run_tests(Variant(800, RACES), 1800, EMULATION_SEED="1", TEST_EXAMPLES="0.1")


def test_kernels_without_warp_reductions() -> None:
    """The code for sm_75, threads in another order. Only the tests that select, because the other kernels are the same;
    and wrong tables."""
    only = ["test_select.py", "test_accumulate_select.py", TABLES]
    run_tests(Variant(750), 1800, *only, EMULATION_SEED="2", TEST_EXAMPLES="0.3")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 4])
@pytest.mark.parametrize("arch", [750, 800])
def test_kernels_in_other_orders(arch: int, seed: int) -> None:
    run_tests(Variant(arch, RACES), 3600, EMULATION_SEED=str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [None, 750, 800])
def test_address_and_undefined_behaviour(arch: int | None) -> None:
    """Of the kernels, and with ``arch`` None of the operators for the CPU, for every instruction set."""
    libraries = [subprocess.getoutput(f"g++ -print-file-name={name}") for name in ("libasan.so", "libubsan.so")]
    options = {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    for capability in ("avx512", "avx2", "default") if arch is None else ("avx512",):
        run_tests(Variant(arch, ADDRESS), 3600, EMULATION_SEED="5", ATEN_CPU_CAPABILITY=capability, **options)
