"""The emulator finds what is wrong in a kernel, and nothing in a right one: faults.cpp."""

import ctypes
import re

import pytest
from emulation.build import HERE, RACES, Variant, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
FAULTS = {  # in the order of faults.cpp
    "exchange": "race, .*: threads .* of block|shared memory is read before it is written",
    "exchange_in_warp": "race, (read after write|write after write)",
    "flag": "race, write after write",
    "lane_leaves": "lanes of a warp are apart: .* lane 7 has left",
    "thread_leaves": "threads of a block are apart: thread 0 is at __syncthreads .* thread 32 has left",
    "lanes_apart": "lanes of a warp are apart: lane 0 is at vote .* lane 1 is at __syncwarp",
    "part_of_mask": "a mask is not full",
    "beyond_shared": "the shared memory of line .* was written outside",
    "uninitialised": "shared memory is read before it is written",
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Variant(800, RACES, sources=(HERE / "faults.cpp",)).build()))
    library.run_kernel.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("kernel", range(len(FAULTS)), ids=list(FAULTS))
def test_fault(library: ctypes.CDLL, kernel: int) -> None:
    assert library.run_kernel(kernel, True) == b""
    message = library.run_kernel(kernel, False).decode()
    assert re.search(list(FAULTS.values())[kernel], message), message
