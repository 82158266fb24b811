#!/usr/bin/env python3
"""Which torch versions one wheel works with: the table of docs/install.md.

    .venv/bin/python scripts/torch_versions.py                       # the newest patch of every minor version
    .venv/bin/python scripts/torch_versions.py 2.14.1 2.12.1         # these; other versions keep their results
    .venv/bin/python scripts/torch_versions.py --report              # no trial: only writes the table again

scripts/wheel.sh builds the wheel and the sdist with this interpreter's torch, which must be the one of
scripts/constraints.txt. Each version is then tried in an empty virtual environment, which is removed afterwards, with
about 5 GB on disk for a CUDA build:

    wheel          it installs, and the compiled operators load
    smoke          tests/wheel_smoke.py on two ranks, without NumPy and without a compiler
    DDP, FSDP2     cases of tests/parallel on two ranks, and on four
    nodes          the same of DDP on four ranks as two nodes
    from source    pip install --no-build-isolation of the sdist, with the CUDA operators where nvcc fits

Results are lines of docs/results/torch-versions/runs.jsonl. A version that cannot be installed has its row, too, and
pip's message below the table. pip reads its own configuration; a limit on torch there applies here.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "experiments"))

from experiment.files import script_parser
from experiment.result_file import Result, read_runs, write_run
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "install.md", ROOT / "docs" / "results" / "torch-versions" / "runs.jsonl"
#: What the table stands between.
MARK, END = "<!-- torch versions: written by scripts/torch_versions.py -->", "<!-- end -->"
#: GB of disk that a CUDA build of torch needs, with room for the download.
NEEDED = 12
#: Seconds until a step is ended.
INSTALLING, BUILDING, SMOKE, LOADING = 1800, 3600, 170, 120


@dataclass(frozen=True)
class Training:
    """A column of cases: ranks, seconds until they are ended, arguments of tests/parallel/check_training.py, and cases
    by method."""

    ranks: int
    limit: int
    arguments: list[str]
    plan: dict[str, list[str]]

    def command(self) -> list[str]:
        items = [f"{method}:{','.join(cases)}" for method, cases in self.plan.items()]
        return [str(ROOT / "tests" / "parallel" / "check_training.py"), *self.arguments, *items]


TRAININGS = {
    "DDP": Training(
        2,
        300,
        ["--host", "ddp", "--steps", "8"],
        {
            "iwp": ["plain", "local_steps"],
            "demo": ["plain", "orthogonal", "local_steps_of_two_optimizers"],
            "quantized": ["plain", "grad_scaler"],
        },
    ),
    "FSDP2": Training(
        4,
        900,
        ["--host", "fsdp", "--steps", "4"],
        {
            "iwp": [
                *("plain", "accumulation", "bfloat16_reduction", "cpu_offload", "checkpointed", "tied", "meta_device"),
                *(
                    "unused",
                    "conservation",
                    "distributed_checkpoint",
                    "distributed_checkpoints_of_momentum",
                    "local_steps",
                ),
                *("hooks_of_the_users_own", "nothing_stays_alive", "discarded_steps", "mistakes"),
            ],
            "demo": ["replicas_stay_equal", "conservation"],
            "quantized": ["replicas_stay_equal", "conservation"],
        },
    ),
    "nodes": Training(
        4,
        300,
        ["--host", "ddp", "--nodes", "2", "--steps", "4"],
        {
            "iwp": ["plain", "nodes_by_launcher_and_mesh"],
            "demo": ["plain", "signs"],
            "quantized": ["plain"],
        },
    ),
}
COLUMNS = ("wheel", "smoke", *TRAININGS, "from source")

# A rank's prefix may stand before it.
_ERROR = re.compile(r"^(?:\[rank ?\d+\]:? *)?(ERROR:.*|[A-Za-z_][\w.]*(?:Error|Exception)(?::.*)?)$", re.MULTILINE)
_CASE = re.compile(r"^\[rank \d+\] failed (\S+ \S+)$", re.MULTILINE)
_ADDRESS = re.compile(r"\w+://\S+|host='[^']*'")


def reason(output: str, code: int, limit: int) -> str:
    """Why a command failed, in a line: its first error, with the case that failed, or else its last line."""
    if code in (124, 137):
        return f"ended after {limit} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = _ERROR.findall(output)
    cases = [f"{case}: " for case in _CASE.findall(output)[:1]]
    text = "".join(cases) + _ADDRESS.sub("...", (errors or lines[-1:] or [f"exit status {code}"])[0])
    return text if len(text) <= 200 else text[:197] + "..."


@dataclass
class Environment:
    """An empty virtual environment, in which commands run until their limit.

    Args:
        folder: of the environment, and of the commands: nothing of the checkout is imported from there.
        log: receives the commands and their output.
    """

    folder: Path
    log: Path

    def run(self, limit: int, *command: str, **variables: str) -> str:
        """Returns why it failed, or ""."""
        return self._run(limit, command, {**self.variables(), **variables})

    @staticmethod
    def variables() -> dict[str, str]:
        """This process's own, without what leads to another package."""
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def _run(self, limit: int, command: Sequence[str], variables: Mapping[str, str]) -> str:
        with self.log.open("a+") as log:
            print("$", *command, file=log, flush=True)
            begin = log.tell()
            timed = [shutil.which("timeout") or "timeout", "-k", "30", str(limit), *command]
            process = subprocess.Popen(
                timed, cwd=self.folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                code = process.wait()
            finally:
                process.terminate()  # passed on by timeout, if it still runs
                process.wait()
            log.seek(begin)
            return reason(log.read(), code, limit) if code else ""

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def pip(self, limit: int, *arguments: str) -> str:
        path = f"{self.folder}/venv/bin:{os.environ['PATH']}"
        options = ["--disable-pip-version-check", "-q", "--no-cache-dir", "--no-compile"]
        return self.run(limit, self.python, "-m", "pip", "install", *options, *arguments, PATH=path)

    def torchrun(self, ranks: int, limit: int, *script: str) -> str:
        """Ranks that find the environment's own commands only: no compiler."""
        nodes = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
        nodes += ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        variables = {"PATH": f"{self.folder}/venv/bin", "HOME": str(self.folder), "LANG": "C.UTF-8"}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HVD_COMPRESS_CUDA": "0"}
        return self._run(limit, [self.python, "-m", "torch.distributed.run", *nodes, *script], variables)

    def loads(self) -> str:
        """Why the installed operators do not load, or ""."""
        code = "from hvd_compress import ops; assert ops.COMPILED, 'the compiled operators did not load'"
        return self.run(LOADING, self.python, "-c", code)

    def says(self, code: str) -> str:
        """What an expression of Python is there; "" if torch cannot be imported."""
        command = [self.python, "-c", f"import torch; print({code})"]
        options: dict[str, Any] = {"cwd": self.folder, "env": self.variables(), "timeout": LOADING}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        return "" if done.returncode else done.stdout.strip()


def attempt(version: str, wheel: Path, sdist: Path, log: Path) -> Result:
    """Tries one torch version.

    Returns:
        ``found``: by column why it failed, or ""; only the columns that were tried. ``torch``: the version with its
        build. ``cuda``: whether the sdist built the CUDA operators. ``missing``: if torch could not be installed, why.
    """
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="torch_versions-") as name:
        here = Environment(Path(name), log)
        free = shutil.disk_usage(name).free / 1e9
        if free < NEEDED:
            return {"missing": f"{free:.0f} GB of disk are free in {Path(name).parent}, {NEEDED} are needed"}
        pins = here.folder / "constraints.txt"
        pins.write_text(constraints())
        missing = here.run(LOADING, sys.executable, "-m", "venv", "venv")
        torch = ["-c", str(pins), f"torch=={version}"]
        missing = missing or here.pip(INSTALLING, *torch)
        if missing:
            return {"missing": missing}
        # Together with torch, which pip would replace if the wheel refused it.
        found = {"wheel": here.pip(INSTALLING, *torch, str(wheel)) or here.loads()}
        if not found["wheel"]:
            found["smoke"] = here.torchrun(2, SMOKE, str(ROOT / "tests" / "wheel_smoke.py"))
        # The cases need NumPy and pytest, the build the others.
        tools = here.pip(INSTALLING, "-c", str(pins), "numpy", "pytest", "setuptools>=77", "ninja")
        if not found["wheel"]:
            for column, training in TRAININGS.items():
                found[column] = tools or here.torchrun(training.ranks, training.limit, *training.command())
        build = ["--no-build-isolation", "--no-deps", "--force-reinstall", str(sdist)]
        found["from source"] = tools or here.pip(BUILDING, *build) or here.loads()
        there = "__import__('importlib.util').util.find_spec('hvd_compress._C_cuda') is not None"
        cuda = not found["from source"] and here.says(there) == "True"
        return {"torch": here.says("torch.__version__") or version, "found": found, "cuda": cuda}


def constraints() -> str:
    """scripts/constraints.txt without torch, and without setuptools, of which every torch allows others."""
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if not line.startswith(("#", "torch==", "setuptools==")))


def key(version: str) -> tuple[int, ...]:
    """To compare versions, as 2.14.1 or 2.14.1+cu130."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def oldest() -> tuple[int, ...]:
    """The oldest torch that the package claims to work with."""
    return key(re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0])


def candidates(listing: str) -> list[str]:
    """The newest patch of every minor version from :func:`oldest` on, newest first, in what ``pip index versions``
    prints."""
    listed = re.findall(r"^Available versions: (.*)$", listing, re.MULTILINE)
    versions = [version.strip().partition("+")[0] for line in listed for version in line.split(",")]
    released = sorted({v for v in versions if re.fullmatch(r"[\d.]+", v) and key(v) >= oldest()}, key=key)
    newest = {key(version)[:2]: version for version in released}
    return sorted(newest.values(), key=key, reverse=True)


def report(runs: Iterable[Result]) -> str:
    """The table, newest version first, and below it the reasons of what failed."""
    rows: list[dict[str, str]] = []
    reasons: list[str] = []
    for run in sorted(runs, key=lambda run: key(run["name"]), reverse=True):
        version, found = run.get("torch", run["name"]), run.get("found", {})
        cells = {column: ("**fails**" if found[column] else "passes") if column in found else "-" for column in COLUMNS}
        if run.get("cuda"):
            cells["from source"] += ", with CUDA"
        if "missing" in run:
            cells["wheel"] = "not installed"
        rows.append({"torch": version, **cells})
        failed = {"not installed": run.get("missing", ""), **found}
        reasons += [f"- {version}, {column}: `{why.replace('`', chr(39))}`" for column, why in failed.items() if why]
    table = tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)
    return "\n".join([table, *(["", *reasons] if reasons else [])])


def page(text: str, runs: Iterable[Result]) -> str:
    """docs/install.md with the table as the results are now. Raises ValueError if there is no place for it."""
    if text.count(MARK) != 1:
        raise ValueError(f"expected one line {MARK!r} in the page, got {text.count(MARK)}")
    before, rest = text.split(MARK)
    return f"{before}{MARK}\n{report(runs)}\n{END}{rest.split(END, 1)[1]}"


def build(folder: Path) -> None:
    """The wheel and the sdist, with this interpreter's torch."""
    import torch

    pinned = re.findall(r"^torch==(.*)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE)[0]
    if key(torch.__version__) != key(pinned):
        sys.exit(f"the wheel is built with torch {pinned}, and {sys.executable} has {torch.__version__}")
    command = ["bash", str(ROOT / "scripts" / "wheel.sh"), "--no-smoke", str(folder)]
    subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, stdout=sys.stderr, check=True)


def only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        sys.exit(f"expected one {pattern} in {folder}, got {len(files)}")
    return files[0].resolve()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of torch, as 2.14.1; what pip finds by default")
    parser.add_argument("--dist", type=Path, help="a folder that has the wheel and the sdist of wheel.sh already")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "torch_versions", help="folder for the output")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="whose table is written")
    parser.add_argument("--report", action="store_true", help="only write the table of the results")
    args = parser.parse_args()
    for version in args.versions:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            parser.error(f"expected versions of torch as 2.14.1, got {version!r}")
    page(args.page.read_text(), [])  # an error now, not after the trials
    if not args.report:
        try_all(args.versions or candidates(listing()), args.dist, args.logs.resolve(), args.results)
    runs = list(read_runs(args.results).values())
    print(report(runs))
    args.page.write_text(page(args.page.read_text(), runs))


def listing() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOADING, check=True).stdout


def try_all(versions: Sequence[str], dist: Path | None, logs: Path, results: Path) -> None:
    """Tries the versions in turn. Each one's result is written when it is there."""
    from experiment.metrics import environment

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    logs.mkdir(parents=True, exist_ok=True)
    print("to try:", *versions, file=sys.stderr, flush=True)
    if dist is None:
        dist = logs / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        build(dist)
    wheel, sdist = only(dist, "hvd_compress-*.whl"), only(dist, "hvd_compress-*.tar.gz")
    here = environment()
    config = {name: here[name] for name in ("python", "torch", "hvd_compress", "git_commit")}
    for version in versions:
        begin, log = time.monotonic(), logs / f"{version}.log"
        result = {"config": config, **attempt(version, wheel, sdist, log)}
        write_run(results / version, result)
        print(f"torch {version}: {time.monotonic() - begin:.0f} s, {log}", file=sys.stderr)
        print(report([{"name": version, **result}]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
