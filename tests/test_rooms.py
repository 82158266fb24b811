"""The layout of the package: imports go down only, and only hosts and carriers know Horovod and torch.distributed.

``cli``, the command line, is the top room: it may import every other, and no other imports it."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvd_compress
from hvd_compress import Compressor

PACKAGE = Path(hvd_compress.__file__).parent
#: What each room may import, besides itself.
BELOW = {
    "": {"trainers", "papers", "local", "methods", "hosts", "carriers", "selection", "checkpoints", "engine"},
    "trainers": {"local", "methods", "checkpoints", "hosts", "guards", "carriers", "engine"},
    "papers": {"methods", "selection", "codecs", "engine", "ops", "reference"},
    "local": {"methods", "guards", "engine", "ops", "reference"},
    "hosts": {"gradients", "guards", "carriers", "engine"},
    "methods": {"checkpoints", "selection", "codecs", "guards", "engine", "ops", "reference"},
    "gradients": {"guards", "engine"},
    "selection": {"codecs", "engine", "ops", "reference"},
    "codecs": {"engine", "ops", "reference"},
    "checkpoints": {"guards", "engine"},
    "guards": {"engine"},
    "carriers": {"engine"},
    "engine": {"ops", "reference"},
    "ops": {"reference"},
    "reference": set(),
}
BELOW["cli"] = {room for room in BELOW if room != "checkpoints"}
#: Rooms that may import torch.distributed; only carriers import Horovod.
DISTRIBUTED = {"hosts", "carriers"}
#: Modules of other rooms that may import both: they start ranks of their own.
RANKS = {"cli.ranks", "cli.peers"}
#: torch's functions that make a tensor of the default dtype or on the default device, unless they are given both.
FACTORIES = {
    *("empty", "zeros", "ones", "full", "eye", "tensor", "as_tensor", "asarray", "scalar_tensor", "empty_strided"),
    *("arange", "range", "linspace", "logspace", "rand", "randn", "randint", "randperm", "normal"),
}
#: The most lines of Python that somebody must read: of a module with all that it imports, one after the other, and of
#: rooms. Lower them when they fall. Only an issue may raise them. The package's goal is 17,200.
CLOSURES = {"methods.quantized": 5_484, "methods.iwp": 7_138, "local.steps": 8_086}
CORE_ROOMS = ("engine", "gradients", "local", "methods", "selection", "codecs", "guards")
CORE_CARRIERS = ("carriers.horovod", "carriers.torch_collectives", "carriers.direct")
MOST_OF_THE_CORE, MOST_OF_THE_PACKAGE = 12_088, 20_476
MOST_CLASSES_BETWEEN = 2
MOST_NAMES = 24
_GRAD = "the protocol of the host, which reads the gradient there"
#: By module and attribute, how often the package writes an attribute of an object of somebody else, and why.
WRITTEN_BY_OTHERS = {
    ("carriers.torchft", "manager._client"): (1, "quorums of a restarted lighthouse repeat numbers"),
    ("carriers.torchft", "manager._quorum_future"): (1, "torchft raises an error of the last quorum again"),
    ("carriers.torchft", "quorum.quorum_id"): (1, "an answer of torchft's client, which nobody else has"),
    ("cli.kernels", "parameter.grad"): (1, "gradients of its own sample, as backward would leave them"),
    ("cli.synthetic", "ctx.gradient"): (1, "torch's protocol: what forward keeps for backward"),
    ("cli.synthetic", "ctx.pause"): (1, "torch's protocol: what forward keeps for backward"),
    ("hosts.ddp", "parameter.grad"): (1, _GRAD),
    ("hosts.loop", "parameter.grad"): (1, _GRAD),
    ("hosts.fsdp", "p.grad"): (1, _GRAD),
    ("hosts.fsdp", "self._engine.parameters[number].grad"): (2, _GRAD),
    ("hosts.gradient_hook", "ddp.broadcast_buffers"): (1, "DDP reads it in each forward pass and has no call for it"),
    ("hosts.gradient_hook", "ddp.require_backward_grad_sync"): (1, "no_sync(), for one forward pass"),
    ("hosts.fsdp_modules", "cast(Any, module._get_fsdp_state())._hvd_compress"): (1, "lives as long as the module"),
    ("hosts.fsdp_modules", "self.group._partial_reduce_output"): (2, "FSDP2 has no call for it"),
    ("local.averaged_steps", "p.grad"): (1, "torch's protocol: what an optimizer steps by, and nothing if it is None"),
    ("reference.low_bit", "p.grad"): (1, "as local.averaged_steps"),
    ("papers.predictor", "owner.*"): (1, "torch's settings of precision, for a while"),
    ("trainers.transformers", "trainer.evaluation_loop"): (1, "the Trainer tells nobody that an evaluation begins"),
}


@cache
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


@cache
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


def test_the_engine_names_neither_of_its_clocks_nor_a_host():
    """Steps of gradients and rounds of local steps are beside each other, above the engine."""
    clocks = {"GradientStep", "GradientSteps", "Rounds", "LocalSteps", "local_steps", "scaler", "hosts", "fsdp", "ddp"}
    for name, path in modules().items():
        if room(name) != "engine":
            continue
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert not names & clocks, (name, names & clocks)
    imported = {name: {room(other) for other in imported_modules(name, path)} for name, path in modules().items()}
    for name, rooms in imported.items():
        assert room(name) != "local" or "gradients" not in rooms, name
        assert room(name) not in {"gradients", "hosts", "methods"} or "local" not in rooms, name


def test_no_class_of_the_package_has_many_public_names():
    """Whoever opens one should see what it is for. Inherited names count where they were defined."""
    counts = {}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                counts[f"{name}.{node.name}"] = len(public_names(node))
    many = {name: count for name, count in counts.items() if count > MOST_NAMES}
    assert len(counts) > 100 and not many, many


def public_names(node: ast.ClassDef) -> set[str]:
    """Methods, properties, class attributes, and attributes that methods give to ``self``."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and inner in node.body:
            names.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names |= {inner.attr} if ast.unparse(inner.value) == "self" else set()
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        names |= {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    return {name for name in names if not name.startswith("_")}


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


def lines(name: str) -> int:
    return len(modules()[name].read_text().splitlines())


def closure(name: str) -> set[str]:
    """The modules that a module reaches, itself included."""
    found, left = set[str](), [name]
    while left:
        if (here := left.pop()) not in found:
            found.add(here)
            left += imported_modules(here, modules()[here])
    return found - {""}


@pytest.mark.parametrize(("name", "most"), CLOSURES.items())
def test_what_a_module_stands_on(name, most):
    count = sum(map(lines, closure(name)))
    print(f"{name}: {count:,} lines in {len(closure(name))} modules")
    assert count <= most


def test_what_somebody_must_read():
    core = sum(lines(name) for name in modules() if room(name) in CORE_ROOMS or name in CORE_CARRIERS)
    whole = sum(map(lines, modules()))
    print(f"core: {core:,} lines; package: {whole:,}")
    assert core <= MOST_OF_THE_CORE and whole <= MOST_OF_THE_PACKAGE


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


def scopes(tree: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes of each function, class body and module, without those of inner ones."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, inner))):
        nodes, left = [], list(ast.iter_child_nodes(scope))
        while left:
            nodes.append(node := left.pop())
            left += [] if isinstance(node, inner) else ast.iter_child_nodes(node)
        yield nodes


def makes_an_object(value: ast.AST | None) -> bool:
    """Whether it calls a class, or copies: others return objects that somebody has."""
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2].lstrip("_")
    return name[:1].isupper() or name == "copy"


def attributes_written(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(object, name of its attribute) of what a statement writes; "*" for a name that is not a constant."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value, node.attr
    if not isinstance(node, ast.Call) or not node.args:
        return
    function, owner, arguments = ast.unparse(node.func), node.args[0], node.args[1:]
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "object":
        owner, arguments = node.func.value, node.args
    name = str(arguments[0].value) if arguments and isinstance(arguments[0], ast.Constant) else "*"
    if function.rpartition(".")[2] in {"setattr", "delattr", "__setattr__", "__delattr__"}:
        yield owner, name
    # A leaf of a checkpoint writes there when it is loaded.
    if function in {"Entry", "OptionalTensor"} and isinstance(owner, ast.Call) and ast.unparse(owner.func) == "vars":
        yield owner.args[0], name


def written_by_others(source: str) -> Iterator[str]:
    """The attributes that are written, but not by a method of their object, nor by the function that has made it."""
    for nodes in scopes(ast.parse(source)):
        own = {"self", "cls", "super()"}
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and makes_an_object(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in nodes:
            yield from (f"{ast.unparse(x)}.{name}" for x, name in attributes_written(node) if ast.unparse(x) not in own)


def test_an_attribute_is_written_by_its_owner():
    """Others call a method, which says what it means."""
    found = Counter((name, what) for name, path in modules().items() for what in written_by_others(path.read_text()))
    lines = [f"{name}: {what}, {count} times" for (name, what), count in sorted(found.items())]
    print(*lines, sep="\n")
    assert found == {place: count for place, (count, _) in WRITTEN_BY_OTHERS.items()}, "\n".join(lines)


WRITES = """x.y = 1; x.y += 1; x.y: int = 1; a, (x.y, b) = z; [*x.y] = z; x.y = b = z; del x.y; for x.y in z: pass
with z as x.y: pass; [0 for x.y in z]; setattr(x, 'y', 1); object.__setattr__(x, 'y', 1); x.__setattr__('y', 1)
Entry(vars(x), 'y', int)"""
OWN = """self.y = 1; cls.y += 1; setattr(self, 'y', 1); object.__setattr__(self, 'y', 1); super().__setattr__('y', 1)
Entry(vars(self), 'y', int); x = y.z; x[y.z] = 1"""


@pytest.mark.parametrize(
    "code", [*(line.strip() for line in WRITES.replace("\n", ";").split(";")), "x = get()\nx.y = 1", "x = z\nx.y = 1"]
)
def test_every_way_to_write_an_attribute_is_found(code):
    inside = "\n    ".join(code.splitlines())
    for before in ("", "x = A()\n"):  # made by somebody else
        assert [*written_by_others(f"{before}def f():\n    {inside}")] == ["x.y"]
    assert [*written_by_others(f"class A:\n  def f(self):\n    {inside}".replace("x", "self.x"))] == ["self.x.y"]


@pytest.mark.parametrize(
    "code",
    [
        *(line.strip() for line in OWN.replace("\n", ";").split(";")),
        *("x = A()\nx.y = 1", "x: A = b._A()\nx.y = 1", "x = copy.copy(self)\nx.y, x.z = 1, 2"),
    ],
)
def test_an_object_may_write_its_own_attributes_and_a_function_those_of_what_it_has_made(code):
    inside = "\n    ".join(code.splitlines())
    assert not [*written_by_others(f"def f(self):\n    {inside}")]


def test_few_classes_lie_between_a_method_and_the_base():
    methods = [c for c in vars(hvd_compress).values() if isinstance(c, type) and issubclass(c, Compressor)]
    assert len(methods) > 9
    for method in methods:
        between = [c for c in method.__mro__[1:] if issubclass(c, Compressor) and c is not Compressor]
        assert len(between) <= MOST_CLASSES_BETWEEN, (method, between)


def test_importing_the_package_imports_neither_horovod_nor_fsdp_nor_a_trainer():
    """Not even an installed Horovod: sys.modules["horovod"] = None makes the import fail. FSDP takes most of a
    second."""
    script = (
        "import sys; sys.modules['horovod'] = None; import hvd_compress; "
        "foreign = ('horovod', 'torch.distributed.fsdp', 'torch.distributed.checkpoint', 'lightning', 'transformers', "
        "'accelerate'); "
        "assert sorted(m for m in sys.modules if m.startswith(foreign)) == ['horovod']; print(hvd_compress.IWP)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
