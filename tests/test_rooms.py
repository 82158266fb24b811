"""The layout of the package: imports go down only, and only hosts and carriers know Horovod and torch.distributed.

``cli``, the command line, is the top room: it may import every other, and no other imports it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hvd_compress
from hvd_compress import Compressor

PACKAGE = Path(hvd_compress.__file__).parent
#: What each room may import, besides itself.
BELOW = {
    "cli": {"", "local", "methods", "hosts", "selection", "codecs", "carriers", "engine", "ops", "reference"},
    "": {"local", "methods", "hosts", "selection", "engine"},
    "local": {"methods", "hosts", "carriers", "engine", "reference"},
    "methods": {"hosts", "selection", "codecs", "carriers", "engine", "ops", "reference"},
    "hosts": {"carriers", "engine"},
    "selection": {"codecs", "engine", "ops", "reference"},
    "codecs": {"engine", "ops", "reference"},
    "carriers": {"engine"},
    "engine": {"ops", "reference"},
    "ops": {"reference"},
    "reference": set(),
}
#: Rooms that may import torch.distributed; only carriers import Horovod.
DISTRIBUTED = {"hosts", "carriers"}
#: Modules of other rooms that may import both: they start ranks of their own.
RANKS = {"cli.ranks", "cli.transport"}
#: torch's functions that make a tensor of the default dtype or on the default device, unless they are given both.
FACTORIES = {
    *("empty", "zeros", "ones", "full", "eye", "tensor", "as_tensor", "asarray", "scalar_tensor", "empty_strided"),
    *("arange", "range", "linspace", "logspace", "rand", "randn", "randint", "randperm", "normal"),
}
MOST_CLASSES_BETWEEN = 2


def modules() -> dict[str, Path]:
    """The package's files by module name, without the name of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") of every import statement in a file, in functions too; relative ones resolved."""
    here = ["hvd_compress", *filter(None, name.split("."))]
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def imported_modules(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports."""
    known, found = modules(), set()
    for module, member in imports(name, path):
        if module.partition(".")[0] == "hvd_compress":
            inner = module.partition(".")[2]
            joined = ".".join(filter(None, [inner, member]))
            found.add(joined if joined in known else inner)
    return found - {name}


def room(name: str) -> str:
    first = name.partition(".")[0]
    if first == "__main__":
        return "cli"
    return first if first in BELOW else ""


def test_every_module_is_in_a_room():
    outside = {name for name in modules() if not room(name)}
    assert outside == {"", "_version", "recipes", "schedule"}
    assert {room(name) for name in modules()} == set(BELOW)


def test_imports_go_down_only():
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imported_modules(name, path)
        if other != "_version" and room(other) not in {room(name), *BELOW[room(name)]}
    ]
    assert not wrong, wrong


def test_there_are_no_import_cycles():
    graph = {name: imported_modules(name, path) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_only_carriers_import_horovod_and_only_they_and_hosts_torch_distributed():
    for name, path in modules().items():
        for module, member in imports(name, path):
            full = f"{module}.{member}"
            if full.startswith("horovod."):
                assert room(name) == "carriers" or name in RANKS, f"{name} imports {full}"
            if full.startswith(("torch.distributed", "torch._C._distributed")):
                assert room(name) in DISTRIBUTED or name in RANKS, f"{name} imports {full}"


def test_only_hosts_and_carriers_use_torch_distributed_by_attribute():
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
                assert room(name) in DISTRIBUTED, f"{name}, line {node.lineno}"


def test_every_tensor_is_made_with_its_own_dtype_and_device():
    """torch.set_default_dtype() and torch.set_default_device() are the user's."""
    found, wrong = 0, []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{factory}" for factory in FACTORIES}:
                found += 1
                given = {keyword.arg for keyword in node.keywords}
                wrong += [] if {"dtype", "device"} <= given else [f"{name}, line {node.lineno}"]
    assert found > 50 and not wrong, wrong


def test_few_classes_lie_between_a_method_and_the_base():
    methods = [c for c in vars(hvd_compress).values() if isinstance(c, type) and issubclass(c, Compressor)]
    assert len(methods) > 9
    for method in methods:
        between = [c for c in method.__mro__[1:] if issubclass(c, Compressor) and c is not Compressor]
        assert len(between) <= MOST_CLASSES_BETWEEN, (method, between)


def test_importing_the_package_imports_neither_horovod_nor_fsdp():
    """Not even an installed Horovod: sys.modules["horovod"] = None makes the import fail. FSDP takes most of a
    second."""
    script = (
        "import sys; sys.modules['horovod'] = None; import hvd_compress; "
        "foreign = ('horovod', 'torch.distributed.fsdp', 'torch.distributed.checkpoint'); "
        "assert sorted(m for m in sys.modules if m.startswith(foreign)) == ['horovod']; print(hvd_compress.IWP)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
