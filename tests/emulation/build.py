"""Builds the operators for tests of the CUDA kernels without a GPU, and for the sanitizers.

A build is kept in ``build/emulation`` under a hash of its sources and of the command; it is made again only if one of
them changes.
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
TORCH = Path(torch.__file__).parent
COMPILER = os.environ.get("CXX", "g++")
RACES = ["-fsanitize=thread"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]

#: Why the kernels cannot be emulated here, or "".
MISSING = (
    "the emulator's switch of stacks is for x86-64"
    if platform.machine() not in ("x86_64", "AMD64")
    else "there is no g++"
    if shutil.which(COMPILER) is None or "Free Software" not in subprocess.getoutput(f"{COMPILER} --version")
    else ""
)


@dataclass(frozen=True)
class Variant:
    """One build.

    Args:
        arch: the architecture whose code is emulated, 800 for sm_80; None builds the operators for the CPU.
        sanitizer: compiler flags, ``RACES`` or ``ADDRESS``.
        csrc: the folder of the sources.
    """

    arch: int | None
    sanitizer: tuple[str, ...] = ()
    csrc: Path = ROOT / "csrc"

    def sources(self) -> list[Path]:
        if self.arch is None:
            return [self.csrc / "ops.cpp", *sorted(self.csrc.glob("cpu/*.cpp"))]
        return [self.csrc / "ops.cpp", self.csrc / "cpu" / "isa.cpp", *sorted(self.csrc.glob("cuda/*.cu"))]

    def flags(self) -> list[str]:
        flags = ["-std=c++20", "-O2", "-g1", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
        flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(TORCH / "include"), *self.sanitizer]
        if self.arch is not None:
            flags += ["-DUSE_CUDA", f"-DEMULATED_ARCH={self.arch}", f"-I{HERE}"]
        return flags

    def emulator(self) -> list[str]:
        """The flags of the emulator itself, which is not instrumented."""
        flags = [flag for flag in self.flags() if "sanitize" not in flag]
        flags += ["-DEMULATION_RACES"] * (list(self.sanitizer) == RACES)
        return flags + ["-DEMULATION_EXACT_MEMORY"] * (list(self.sanitizer) == ADDRESS)

    def build(self) -> Path:
        """Returns the extension, in place of ``hvd_compress/_C.abi3.so``."""
        inputs = [*self.csrc.rglob("*.*"), *HERE.glob("*.cpp"), *HERE.glob("*.h")]
        digest = hashlib.sha256(repr([COMPILER, self.flags(), torch.__version__]).encode())
        for path in sorted(inputs):
            digest.update(path.name.encode() + path.read_bytes())
        folder = ROOT / "build" / "emulation" / digest.hexdigest()[:16]
        extension = folder / "_C.abi3.so"
        if extension.exists():
            return extension
        folder.mkdir(parents=True, exist_ok=True)
        commands = {folder / f"{path.stem}.o": ["-x", "c++", str(path), *self.flags()] for path in self.sources()}
        if self.arch is not None:
            commands |= {folder / f"{path.stem}.o": [str(path), *self.emulator()] for path in HERE.glob("*.cpp")}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = [pool.submit(run, COMPILER, *flags, "-c", "-o", str(to)) for to, flags in commands.items()]
            for each in done:
                each.result()
        linked = folder / "linked"
        sanitizer = self.sanitizer if list(self.sanitizer) == ADDRESS else ()  # the race detector has its own runtime
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch", "-ldl"]
        run(COMPILER, "-shared", *sanitizer, "-Wl,-Bsymbolic", "-o", str(linked), *map(str, commands), *libraries)
        return linked.rename(extension)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-6000:]}")
