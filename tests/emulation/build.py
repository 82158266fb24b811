"""Builds the operators for tests of the CUDA kernels without a GPU, and for the sanitizers.

Objects and libraries are kept in ``build/emulation`` under a hash of what they are made of, and made once.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEPT = ROOT / "build" / "emulation"
TORCH = Path(torch.__file__).parent
EMULATOR = (HERE / "emulator.cpp", HERE / "switch.cpp", HERE / "races.cpp", HERE / "device.cpp")
COMPILER = "g++"
RACES = ("-fsanitize=thread",)
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all")


def missing() -> str:
    """Why the kernels cannot be emulated here, or an empty string."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the emulator switches stacks in x86-64 assembly"
    return "" if shutil.which(COMPILER) else "there is no g++"


@dataclass(frozen=True)
class Variant:
    """One build.

    Args:
        arch: the architecture whose code is emulated, 800 for sm_80. None: the operators for the CPU, not emulated.
        sanitizer: compiler flags, ``RACES`` or ``ADDRESS``.
        csrc: the folder of the operators' sources.
        sources: others in place of the operators'.
    """

    arch: int | None
    sanitizer: tuple[str, ...] = ()
    csrc: Path = ROOT / "csrc"
    sources: tuple[Path, ...] = ()

    def build(self) -> Path:
        """Returns the shared library; of the operators, it takes the place of ``hvd_compress/_C.abi3.so``."""
        headers = sorted([*self.csrc.rglob("*.h"), *HERE.glob("*.h")])
        common = b"".join(path.read_bytes() for path in headers) + torch.__version__.encode()

        def compiled(path: Path, flags: list[str]) -> Path:
            name = hashlib.sha256(common + repr(flags).encode() + path.read_bytes()).hexdigest()[:16]
            return _made(KEPT / f"{path.stem}-{name}.o", [*flags, "-c", "-x", "c++", str(path)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [str(made) for made in pool.map(compiled, *zip(*self._commands(), strict=True))]
        runtime = self.sanitizer if self.sanitizer == ADDRESS else ()  # races.cpp is the other's
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch", "-ldl"]
        link = ["-shared", *runtime, "-Wl,-Bsymbolic", *objects, *libraries]
        return _made(KEPT / f"{hashlib.sha256(repr(link).encode()).hexdigest()[:16]}.so", link)

    def _commands(self) -> list[tuple[Path, list[str]]]:
        """Every source, and its flags."""
        flags = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
        flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(TORCH / "include")]
        folder = "cpu/*.cpp" if self.arch is None else "cuda/*.cu"
        sources = self.sources or (self.csrc / "ops.cpp", *sorted(self.csrc.glob(folder)))
        if self.arch is None:
            return [(path, [*flags, *self.sanitizer]) for path in sources]
        if not self.sources:
            sources = (*sources, self.csrc / "cpu" / "isa.cpp")
        flags += ["-DUSE_CUDA", f"-DEMULATED_ARCH={self.arch}", f"-I{HERE}"]
        # The emulator itself is not instrumented.
        own = {RACES: ["-DEMULATION_RACES"], ADDRESS: ["-DEMULATION_EXACT_MEMORY"]}.get(self.sanitizer, [])
        emulator = [(path, [*flags, *own]) for path in EMULATOR]
        return [*((path, [*flags, *self.sanitizer]) for path in sources), *emulator]


def _made(path: Path, arguments: list[str]) -> Path:
    """The file, made by the compiler if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [COMPILER, *arguments, "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-6000:]}")
        unfinished.rename(path)
    return path
