#!/usr/bin/env python3
"""Predict the time of the codebook and moments kernels on an H200, without one, before and after a change.

    PATH=/where/cuobjdump/is:$PATH python scripts/lab/kernel_model.py --old fa2a29b

Needs nvcc 13 with cuobjdump and nvdisasm, and g++. For each kernel of the old commit and of the working tree:

- instructions per value: the shortest way through the kernel's machine code (sm_90) that contains its loads and stores
  of values, times how often it is taken. Branches for ragged and unaligned ends are not on it.
- sectors per value: pieces of 32 bytes that the warps' requests touch, counted on the emulator of tests/emulation.
- dependent loads: how many loads, of those before a warp's last store, wait for another one; by reading.

The time is ``launches * a + (memory**p + (b * issue + c * latency)**p)**(1 / p)``: memory is bytes / bandwidth of a
copy, issue is instructions / what all schedulers issue, latency is rounds of resident warps * dependent loads. a, b, c
and p are fitted to the rows of docs/results/gpu/h200.md that the old kernels measured; the fit's errors are printed.
"""

import argparse
import ctypes
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from heapq import heappop, heappush
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "emulation")]
N, RUN, GROUPS = 25_000_000, 512, 4
COPY = 3321.1e9  # bytes a second, read and written; docs/results/gpu/h200.md
MULTIPROCESSORS, SCHEDULERS, CLOCK, REGISTERS = 132, 4, 1.755e9, 65536


class Kernel:
    """The machine code of a kernel, as a graph of instructions."""

    def __init__(self, text: str) -> None:
        lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.M)
        self.code = [instruction for _, instruction in lines]
        self.at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        self.known: dict[int, dict[int, int]] = {}  # distances

    def after(self, i: int) -> list[int]:
        text, following = self.code[i], [i + 1] * (i + 1 < len(self.code))
        branch = re.search(r"\bBRA\b(?!\.DIV).*?0x([0-9a-f]+)", text)
        if branch:
            target = [self.at[int(branch[1], 16)]]
            return target + following if text.startswith("@") or re.search(r"BRA !?U?P\d", text) else target
        return following if text.startswith("@") or "EXIT" not in text else []

    def distances(self, start: int) -> dict[int, int]:
        """Instructions to all others, from the one after ``start`` on."""
        if start in self.known:
            return self.known[start]
        found = self.known[start] = {}
        queue = [(1, i) for i in self.after(start)]
        while queue:
            steps, i = heappop(queue)
            if i not in found:
                found[i] = steps
                for j in self.after(i):
                    heappush(queue, (steps + (self.code[j] != "NOP"), j))
        return found

    def through(self, start: dict[int, int], patterns: list[str]) -> dict[int, int]:
        for pattern in patterns:
            reached: dict[int, int] = {}
            for i, steps in start.items():
                for j, more in self.distances(i).items():
                    if re.search(pattern, self.code[j]):
                        reached[j] = min(reached.get(j, 10**9), steps + more)
            start = reached
        return start

    def path(self, *patterns: str) -> int:
        """From the beginning through instructions of these patterns."""
        return min(self.through({0: 1}, list(patterns)).values())

    def cycle(self, *patterns: str) -> int:
        """The shortest loop through instructions of these patterns."""
        starts = [i for i, text in enumerate(self.code) if re.search(patterns[0], text)]
        ends = [(i, self.through({i: 0}, list(patterns[1:]))) for i in starts]
        loops = [s + self.distances(j).get(i, 10**9) for i, reached in ends for j, s in reached.items()]
        return min(loops)


def compiled(csrc: Path, folder: Path) -> dict[str, tuple[Kernel, int]]:
    """Each kernel, and its registers."""
    from emulation.build import TORCH

    kernels = {}
    for name in ("codebook", "moments"):
        cubin = folder / f"{name}.cubin"
        flags = ["-std=c++20", "-O3", "-fmad=false", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
        command = ["nvcc", "-cubin", "-arch=sm_90", "--expt-relaxed-constexpr", *flags, "-isystem", TORCH / "include"]
        subprocess.run([*command, csrc / "cuda" / f"{name}.cu", "-o", cubin], check=True)
        dump = [subprocess.check_output(["cuobjdump", option, cubin], text=True) for option in ("-sass", "-res-usage")]
        registers = dict(re.findall(r"Function (\S+):\s+REG:(\d+)", dump[1]))
        for text in dump[0].split("Function : ")[1:]:
            kernels[text.split()[0]] = Kernel(text), int(registers[text.split()[0]])
    return kernels


def named(kernels: dict, pattern: str) -> tuple[Kernel, int]:
    return next(kernel for name, kernel in kernels.items() if re.search(pattern, name))


def work(kernels: dict, old: bool, operator: str, bits: int, runs: bool) -> tuple[float, float, int, int]:
    """Instructions per value; dependent loads of a warp; its values per lane; registers of a thread."""
    searches = math.log2(N / RUN if runs else GROUPS)  # steps among all edges
    often = 4 if runs else 1  # of a thread's 8 values; runs: two of 256 threads apart are in one run
    kernel: Kernel
    if operator == "moments" and old:
        kernel, registers = named(kernels, "parts_kernel")
        values = RUN // 32 if runs else 8192 // 32
        join, last = kernel.path("SHFL", *["SHFL"] * 24, "STG"), named(kernels, "moments_kernel")[0].path("STG.E.64")
        before = kernel.cycle("LDG.E.64") * searches + join + (last if runs else 0)
        each = kernel.cycle(*["LDG.E.C"] * 8, "DADD") / 8
        return each + before / values, searches + 2 + values / 8, values, registers
    if operator == "moments":
        kernel, registers = named(kernels, f"parts_kernelILi{4 if runs else 1}E")
        values = 4 * RUN // 32 if runs else 8192 // 32
        loads, shuffles = (["LDG.E.128"] * 4, 60) if runs else (["LDG.E.C|LDG.E R"] * 8, 25)
        before = kernel.path("VOTE", loads[0]) + kernel.path(*["SHFL"] * shuffles, "STG") - kernel.path("SHFL")
        each, waits = (16, values / 16) if runs else (8, values / 8)
        return kernel.cycle(*loads, "DADD") / each + before / values, 3 + waits, values, registers
    if operator == "encode" and old:
        kernel, registers = named(kernels, "encode_kernel")
        nearest = kernel.cycle("LDG.E.C", "LDG.E.C", "FSETP") * bits
        pack = kernel.path("BAR", "LDS.128", "BAR", "STG") - kernel.path("BAR")
        outer = kernel.cycle("LDG.E.C", r"STG.E ", "STS.U16") + nearest + pack / 8
        return outer + kernel.cycle("LDG.E.64") * searches * often / 8, searches * often + 8 * (bits + 3), 8, registers
    if old:
        kernel, registers = named(kernels, "decode_kernel")
        outer = kernel.cycle("LDG.E.U8", r"STG.E ") + kernel.cycle("LDG.E.64") * searches * often / 8
        return outer, searches * often + 8 * 3, 8, registers
    kernel, registers = named(kernels, f"{operator}_tilesILi{bits}E")
    loop = ["LDG.E.128", "VOTE", "FSETP"] if operator == "encode" else ["LDG.E.*CONSTANT", "VOTE"]
    book = max(1, 2 ** (bits + 1) // 256) * 30  # two rows are read by 256 threads
    before = kernel.path("BAR", "VOTE", "LDG.E.64", "VOTE") + book
    return kernel.cycle(*loop, "STG.E.128", "STG.E.128") / 8 + before / 32, 6, 32, registers


# Milliseconds in docs/results/gpu/h200.md, of the commit before: operator, bits, runs, added.
MEASURED = {
    ("moments", 0, False, False): 0.052, ("moments", 0, True, False): 0.086,
    ("encode", 4, False, False): 0.146, ("decode", 4, False, False): 0.087,
    ("encode", 1, True, False): 0.367, ("decode", 1, True, False): 0.342, ("decode", 1, True, True): 0.344,
    ("encode", 2, True, False): 0.380, ("decode", 2, True, False): 0.342, ("decode", 2, True, True): 0.344,
    ("encode", 4, True, False): 0.406, ("decode", 4, True, False): 0.342, ("decode", 4, True, True): 0.343,
    ("encode", 8, True, False): 0.460, ("decode", 8, True, False): 0.344, ("decode", 8, True, True): 0.346,
}  # fmt: skip


def parts(row: tuple, counted: tuple[float, float, int, int]) -> tuple[int, float, float, float]:
    """Launches; milliseconds of memory, of issue, and of one cycle of latency per dependent load."""
    operator, bits, _, added = row
    instructions, loads, values, registers = counted
    size = {"moments": 4, "encode": 8 + bits / 8, "decode": 4 + bits / 8 + 4 * added}[operator]
    resident = min(64, 65536 // (256 * -(-registers // 8) * 8) * 8) * MULTIPROCESSORS
    issue = N / 32 * instructions / (MULTIPROCESSORS * SCHEDULERS * CLOCK)
    latency = N / 32 / values / resident * loads / CLOCK
    return 2 if operator == "moments" else 1, N * size / COPY * 1e3, issue * 1e3, latency * 1e3


def seconds(of: tuple[int, float, float, float], a: float, b: float, c: float, p: float) -> float:
    launches, memory, issue, latency = of
    return launches * a + (memory**p + (b * issue + c * latency) ** p) ** (1 / p)


def fitted(given: dict[tuple, tuple]) -> tuple[float, ...]:
    """The parameters of least squared logarithmic error, by search on a grid."""
    grid = itertools.product(
        (0.002, 0.004, 0.006, 0.008, 0.01), [1 + i / 10 for i in range(16)], range(0, 620, 20), (1, 1.25, 1.5, 2, 3, 4)
    )
    rows = [(given[row], math.log(ms)) for row, ms in MEASURED.items()]
    return min(grid, key=lambda x: sum((math.log(seconds(of, *x)) - log) ** 2 for of, log in rows))


def requests(csrc: Path) -> dict[str, list[float]]:
    """Loads' and stores' sectors, and cycles of shared memory, per 32 values: on the emulator, in another process."""
    from emulation import build

    counter = Path(__file__).with_name("sectors.cpp")
    build.EMULATOR = tuple(counter if path.name == "races.cpp" else path for path in build.EMULATOR)
    library = str(build.Variant(800, build.RACES, csrc).build())
    command = [sys.executable, __file__, "--count", library]
    environment = {**os.environ, "OPERATORS": library, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.check_output(command, env=environment))


def count(library: str) -> None:
    import emulated  # noqa: F401, hvd_compress loads the library
    import torch

    from hvd_compress import ops

    torch.manual_seed(0)
    n, found = 1 << 15, {}
    for operator, bits, runs, added in MEASURED:
        groups = n // RUN if runs else GROUPS
        edges, scale = torch.arange(groups + 1) * (n // groups), torch.ones(groups)
        book = torch.linspace(-2, 2, 2**bits).repeat(2, 1)
        values, codes = torch.randn(n), torch.randint(0, 256, (n // 8 * bits,)).to(torch.uint8)
        tables = (scale, edges, book, torch.arange(groups) % 2)
        into = (ctypes.c_uint64 * 6)()
        emulator = ctypes.CDLL(library)
        emulator.emulation_requests(into)
        if operator == "moments":
            ops.moments(values, edges, torch.zeros(groups, 3, dtype=torch.float64))
        elif operator == "encode":
            ops.codebook_encode(values, *tables, codes, torch.zeros(n), bits)
        else:
            ops.codebook_decode(codes, *tables, values, bits, added)
        emulator.emulation_requests(into)
        found[str((operator, bits, runs, added))] = [into[i] / (n / 32) for i in (1, 3, 5)]
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", default="fa2a29b", help="a commit with the kernels of docs/results/gpu/h200.md")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        return count(args.count)
    with tempfile.TemporaryDirectory() as folder:
        sources = {True: Path(folder, "old", "csrc"), False: ROOT / "csrc"}
        sources[True].parent.mkdir()
        archive = subprocess.check_output(["git", "-C", ROOT, "archive", args.old, "csrc"])
        subprocess.run(["tar", "-x", "-C", sources[True].parent], input=archive, check=True)
        kernels = {old: compiled(csrc, Path(folder)) for old, csrc in sources.items()}
        sectors = {old: requests(csrc) for old, csrc in sources.items()}
    counted = {(old, row): work(kernels[old], old, *row[:3]) for old in (True, False) for row in MEASURED}
    given = {key: parts(key[1], value) for key, value in counted.items()}
    fit = fitted({row: of for (old, row), of in given.items() if old})
    errors = [seconds(given[True, row], *fit) / ms - 1 for row, ms in MEASURED.items()]
    worst, mean = max(errors, key=abs), sum(map(abs, errors)) / len(errors)
    print("a {:.3f} ms, b {:.2f}, c {} cycles, p {}".format(*fit), end=f"; errors: {mean:.0%}, at worst {worst:+.0%}\n")
    print("Each old -> new; sectors of loads and stores per 32 values.\n")
    print("| kernel | instructions | dependent loads | sectors | ms measured | ms by the model | of copy |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for row, ms in MEASURED.items():
        operator, bits, runs, added = row
        name = f"{operator}{f' {bits} bits' if bits else ''}{', runs' * runs}{', added' * added}"
        pair = [(counted[old, row], sectors[old][str(row)], seconds(given[old, row], *fit)) for old in (True, False)]
        cells = [" -> ".join(f"{of[0][0]:.0f}" for of in pair)]
        cells += [" -> ".join(f"{of[0][1]:.0f} of {of[0][2]}" for of in pair)]
        cells += [" -> ".join(f"{of[1][0] + of[1][1]:.1f}" for of in pair), f"{ms:.3f}"]
        cells += [" -> ".join(f"{of[2]:.3f}" for of in pair)]
        cells += [" -> ".join(f"{given[old, row][1] / time:.0%}" for old, time in ((True, ms), (False, pair[1][2])))]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
