"""Builds the compiled operators; all else about the package is in pyproject.toml.

The CPU operators are built always, the CUDA ones where nvcc and a torch for the same CUDA are found.

``HVD_COMPRESS_CUDA=0`` leaves the CUDA operators out, ``HVD_COMPRESS_CUDA=1`` fails where they cannot be built.
They are an extension of their own, so that the CPU one is the same file everywhere and loads without CUDA.
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
from glob import glob
from pathlib import Path

from setuptools import setup

os.chdir(Path(__file__).parent)


def toolkit() -> str | None:
    """The folder of the CUDA toolkit. nvcc itself is asked: the one on PATH may be a wrapper that lies elsewhere."""
    home = os.environ.get("CUDA_HOME")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if nvcc is None or not Path(nvcc).exists():
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False)
    here = re.search(r"_HERE_=(\S+)", plan.stderr)
    return str(Path(here[1]).parent) if here else None


def release(home: str) -> str:
    """The version of that toolkit, as 13.0."""
    text = subprocess.run([Path(home, "bin", "nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    return found[1] if found else "of a version that it does not say"


def major(version: str) -> str:
    return version.split(".")[0]


cuda_home = toolkit()
if cuda_home:
    os.environ["CUDA_HOME"] = cuda_home  # torch reads it when cpp_extension is imported

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(f"hvd_compress needs torch to build: install torch >= 2.11, then use --no-build-isolation ({error})")

compiler = os.environ.get("CXX", "c++").split()[0]
if shutil.which(compiler) is None:
    sys.exit(f"hvd_compress needs a C++20 compiler, and there is no {compiler!r}: install one (e.g. g++) or set CXX")

want = os.environ.get("HVD_COMPRESS_CUDA", "")
if want not in ("", "0", "1"):
    sys.exit(f"HVD_COMPRESS_CUDA has to be 0, 1 or unset, got {want!r}")
has_cuda = cuda_home is not None and torch.version.cuda is not None
with_cuda = want != "0" and has_cuda and major(release(cuda_home)) == major(torch.version.cuda)
if not with_cuda and (want == "1" or (want == "" and has_cuda)):
    nvcc = f"{release(cuda_home)} ({cuda_home})" if cuda_home else "not found"
    reason = f"the CUDA operators need nvcc of torch's CUDA, which is {torch.version.cuda or 'none'}; nvcc is {nvcc}"
    if want == "1":
        sys.exit(f"HVD_COMPRESS_CUDA=1, but {reason}")
    warnings.warn(f"left out: {reason}", stacklevel=1)

# The oldest torch whose stable ABI is used: the binary loads under it and every later one.
TARGET = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
# Equal to the reference to the last bit: a product and a sum are rounded one after the other. Without AVX-512's masks,
# conditions on floats are vectorised only if they need not keep the processor's exception flags.
CXX_FLAGS = [*TARGET, "-std=c++20", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
NVCC_FLAGS = [*TARGET, "-std=c++20", "-O3", "-fmad=false", "-DUSE_CUDA"]
if "TORCH_CUDA_ARCH_LIST" not in os.environ:
    NVCC_FLAGS += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]

extensions = [
    CppExtension(
        "hvd_compress._C",
        ["csrc/ops.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        depends=glob("csrc/*.h") + glob("csrc/cpu/*.h"),
        extra_compile_args={"cxx": CXX_FLAGS},
        py_limited_api=True,
    )
]
if with_cuda:
    extensions.append(
        CUDAExtension(
            "hvd_compress._C_cuda",
            sorted(glob("csrc/cuda/*.cu")),
            depends=glob("csrc/*.h") + glob("csrc/cuda/*.h"),
            extra_compile_args={"cxx": [*CXX_FLAGS, "-DUSE_CUDA"], "nvcc": NVCC_FLAGS},
            py_limited_api=True,
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
