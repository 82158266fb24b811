"""The ``Example::`` in the docstrings of what is public: each runs, and what it builds trains."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress import recipes, schedule

#: Abstract, or with an example that needs several jobs or a mesh.
WITHOUT = {"Compressor", "DCPState", "register_fsdp_hooks", "reshard"}
PUBLIC = {
    found.__name__: found
    for module in (hvd_compress, recipes, schedule)
    for name in getattr(module, "__all__", vars(module))
    if callable(found := getattr(module, name)) and name not in WITHOUT
}


def examples(text: str) -> list[str]:
    found = re.findall(r"^Example::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    return [textwrap.dedent(example) for example in found]


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def given() -> dict[str, object]:
    """What the examples take as the user's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    inputs = torch.randn(32, 16)
    batches = [(inputs, inputs[:, :4].argmax(1))] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "batches": batches, "loss_function": nn.functional.cross_entropy}
    return {**names, "torch": torch, "hvd_compress": hvd_compress, "DistributedDataParallel": DistributedDataParallel}


def train(names: dict[str, object], steps: int = 8) -> tuple[float, float]:
    """The losses before and after some steps by what an example has built."""
    model, loss_function = names.get("ddp", names["model"]), names["loss_function"]
    inputs, targets = names["batches"][0]
    steppers = [names[name] for name in ("muon", "adamw") if name in names] or [names["optimizer"]]
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        for stepper in [*steppers, *([names["local"]] if "local" in names else [])]:
            stepper.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.filterwarnings("error::UserWarning")
def test_example_runs_and_trains(name, one_process):
    (example,) = examples(PUBLIC[name].__doc__)
    names = given()
    exec(example, names)
    trains = not names.keys().isdisjoint(("ddp", "local", "muon"))
    has_loop = "inputs" in names and not trains
    assert trains or has_loop or name in schedule.__all__
    if has_loop:
        assert names["compression"].stats()["steps"] == len(names["batches"])
    if trains:
        before, after = train(names)
        assert after < before
    if "ddp" in names:
        assert names["compression"].stats()["steps"] == 8


def test_examples_are_found():
    assert len(PUBLIC) > 20
    text = "Text.\n\n    Example::\n\n        a = 1\n\n        b = a\n\n    Args:\n        c: d"
    assert examples(text) == ["a = 1\n\nb = a\n\n"]
    assert examples("Text::\n\n    a = 1\n") == []


#: A docstring's first word is a verb or the thing's name: after these, the reader waits for the subject.
NOT_FIRST = {
    *("What", "Which", "Whose", "Where", "Those", "That", "Its", "Of", "With", "By", "From", "In", "On", "At", "For"),
    *("If", "When", "Before", "After", "Between", "Also"),
}


def docstrings():
    for path in sorted(Path(hvd_compress.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.name}, {getattr(node, 'name', 'the module')}: {text.splitlines()[0]}", text.split()[0]


def test_first_words():
    found = dict(docstrings())
    assert len(found) > 1000
    wrong = [where for where, first in found.items() if first in NOT_FIRST]
    assert not wrong, "\n".join(wrong)
