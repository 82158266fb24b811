"""Builds the operators for tests of the CUDA kernels without a GPU, and for the sanitizers.

A build is kept in ``build/emulation`` under a hash of its sources and of the command, and made once.
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
EMULATOR = (HERE / "emulator.cpp", HERE / "races.cpp")
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
        commands = self._commands()
        inputs = [*self.csrc.rglob("*.*"), *HERE.glob("*.h"), *self.sources, *EMULATOR]
        digest = hashlib.sha256(repr([commands, torch.__version__, os.cpu_count()]).encode())
        for path in sorted(inputs):
            digest.update(path.name.encode() + path.read_bytes())
        folder = ROOT / "build" / "emulation" / digest.hexdigest()[:16]
        library = folder / "_C.abi3.so"
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [folder / f"{path.stem}.o" for path, _ in commands]
            done = [
                pool.submit(_run, *flags, "-c", "-x", "c++", str(path), "-o", str(to))
                for (path, flags), to in zip(commands, objects, strict=True)
            ]
            for each in done:
                each.result()
        linked = folder / "linked"
        runtime = self.sanitizer if self.sanitizer == ADDRESS else ()  # races.cpp is the other's
        torch_libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
        _run("-shared", *runtime, "-Wl,-Bsymbolic", "-o", str(linked), *map(str, objects), *torch_libraries, "-ldl")
        return linked.rename(library)

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


def _run(*arguments: str) -> None:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} {' '.join(arguments)}:\n{done.stderr[-6000:]}")
