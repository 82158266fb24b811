"""Every integer, number and flag that a public class or function takes is checked, with an error that names it."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from fractions import Fraction
from functools import partial
from typing import Any, get_args, get_origin

import pytest
import torch
from models import mixed_model

import hvd_compress
from hvd_compress import Compressor, LocalSteps, NoCompression, recipes, schedule
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs import Codec, Lloyd
from hvd_compress.codecs.packed import Code
from hvd_compress.engine.engine import _configuration

#: The arguments of all public classes and functions. One that is in none of these makes a test fail.
INTEGERS = {
    *("bits", "run", "rank", "min_numel", "seed", "leaders", "mantissa", "size", "step", "steps"),
    *("warmup_steps", "budget_interval", "period", "fragments", "delay", "mean_bits"),
}
NUMBERS = {
    *("density", "momentum", "explore", "smoothing", "core"),
    *("clip", "decay", "subtract", "dense_momentum", "bucket_mb", "start_timeout", "timeout"),
    *("outer_lr", "outer_momentum", "highest"),
}
FLAGS = {
    *("block_means", "prediction", "error_feedback", "sign", "stochastic", "filters"),
    *("restore_length", "watch_weights"),
    *("ordered", "in_turn"),
}
#: Objects and names; ``nodes`` and ``orthogonal`` have tests below.
OTHERS = {
    *("named_parameters", "model", "optimizers", "compression", "optimizer", "collectives", "process_set"),
    *("process_group", "nodes", "grad_scaler", "dense_values", "values", "exchange"),
    *("orthogonal", "kind", "code", "mean_code", "rate", "unsent", "saved_on"),
    *("state", "bucket", "states", "others", "on_averaged_gradients"),
}
INFINITE = {"start_timeout", "timeout"}

#: What is given besides, if it is not a method or a recipe.
REQUIRED: dict[str, dict[str, Any]] = {
    "Cast": {"kind": "fp16"},
    "CodedGather": {"code": Lloyd(4)},
    "CodedRing": {"code": Lloyd(4)},
    "diminishing": {"density": 0.1, "rate": lambda: 0.1, "highest": 0.1},
    "Lanes": {"bits": 4},
    "Levels": {"bits": 4},
    "Lloyd": {"bits": 4},
    "Plain": {"bits": 16},
    "RangeFloat": {"bits": 4},
    "WideLloyd": {"bits": 4},
    "Ternary": {"clip": 2.5},
    "ThreadWorld": {"size": 2},
    "warm_up": {"density": 0.1, "steps": 3},
    "collectives": {"rank": 0},
    "hidden_matrices": {"model": torch.nn.Linear(4, 4)},
}
#: Nothing to try.
EMPTY = {"Compressor", "DCPState", "ddp_hook", "register_fsdp_hooks", "reshard"}


def alone(cls: type[Compressor] = NoCompression, model: torch.nn.Module | None = None, **options: Any) -> Compressor:
    world = ThreadWorld(1, ordered=True)
    return cls(model or torch.nn.Linear(4, 4), collectives=world.collectives(0), **options)


def concrete(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield from concrete(cls)
        if not inspect.isabstract(cls) and cls.__module__.startswith("hvd_compress."):
            yield cls


PUBLIC: list[Callable[..., Any]] = [
    *(getattr(hvd_compress, name) for name in hvd_compress.__all__ if callable(getattr(hvd_compress, name))),
    *(getattr(recipes, name) for name in recipes.__all__),
    *(getattr(schedule, name) for name in schedule.__all__),
    *concrete(Codec),
    *concrete(Code),
    *(ThreadWorld, ThreadWorld(2).collectives),
]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those of a class's bases, too, to which it passes further ones on."""
    signatures = [inspect.signature(function)]
    if inspect.isclass(function) and issubclass(function, Compressor):
        signatures = [inspect.signature(vars(cls)["__init__"]) for cls in function.__mro__ if "__init__" in vars(cls)]
    found: dict[str, inspect.Parameter] = {}
    for signature in signatures:
        found = {**signature.parameters, **found}
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            break
    return {name: p for name, p in found.items() if name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def call(function: Callable[..., Any], options: dict[str, Any], model: torch.nn.Module | None = None) -> Any:
    model = model or torch.nn.Linear(4, 4)
    if inspect.isclass(function) and issubclass(function, Compressor):
        if function is hvd_compress.DeMo and options.keys() == {"momentum"}:
            options = {"sign": False, **options}
        return alone(function, model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if function.__name__ in recipes.__all__:
        return function(model, optimizer, collectives=ThreadWorld(1).collectives(0), **options)
    if function is LocalSteps:
        unsent = "buffer" if "decay" in options else "weights"
        return LocalSteps(alone(model=model), optimizer, **{"period": 2, "unsent": unsent, **options})
    return function(**{**REQUIRED[function.__name__], **options})


def named(function: Callable[..., Any]) -> str:
    return function.__name__


def arguments(names: set[str]) -> list[Any]:
    return [
        pytest.param(function, name, p, id=f"{named(function)}-{name}")
        for function in PUBLIC
        if named(function) not in EMPTY
        for name, p in parameters(function).items()
        if name in names
    ]


CLASSES = [
    function
    for function in PUBLIC
    if inspect.isclass(function) and named(function) not in EMPTY and {*parameters(function)} & (INTEGERS | NUMBERS)
]


def check_refused(function: Callable[..., Any], name: str, p: inspect.Parameter, types: list, values: list) -> None:
    """``types`` raise ``TypeError``, ``values`` raise ``ValueError``; both name the argument and what was given."""
    optional = type(None) in get_args(p.annotation)
    for kind, given in ((TypeError, types), (ValueError, values)):
        for value in given:
            if value is not None or not optional:
                with pytest.raises(kind, match=rf"^(each |bits of |)?{name}\b.* must .*got ") as error:
                    call(function, {name: value})
                shown = "nan" if value != value else re.escape(repr(value))[:40]
                assert re.search(shown, str(error.value), re.IGNORECASE), error.value


@pytest.mark.parametrize("function", PUBLIC, ids=named)
def test_every_argument_is_listed_by_its_kind(function):
    for name, p in parameters(function).items():
        kinds = get_args(p.annotation) or (p.annotation,)
        kinds = (p.annotation,) if get_origin(p.annotation) is Callable else kinds
        number = INTEGERS if int in kinds else NUMBERS if float in kinds else FLAGS if kinds == (bool,) else OTHERS
        assert name in number, f"list the argument {name} of {function} in this file, and check it as the others"
    assert named(function) in EMPTY or parameters(function)


@pytest.mark.parametrize(("function", "name", "p"), arguments(INTEGERS))
def test_what_is_no_integer_is_refused(function, name, p):
    wrong = [1.5, 2.0, 1e3, "4", None, True, False, float("nan"), [1], torch.tensor(True), torch.tensor(2.0)]
    check_refused(function, name, p, wrong, [])


@pytest.mark.parametrize(("function", "name", "p"), arguments(NUMBERS))
def test_what_is_no_number_is_refused(function, name, p):
    infinities = [float("-inf"), *([] if name in INFINITE else [float("inf")])]
    wrong = ["0.1", b"1", None, True, False, 1j, [0.5], torch.tensor(0.5)]
    check_refused(function, name, p, wrong, [float("nan"), *infinities])


@pytest.mark.parametrize(("function", "name", "p"), arguments(FLAGS))
def test_what_is_no_flag_is_refused(function, name, p):
    check_refused(function, name, p, ["False", "", None, 2, 0.5, [True], float("nan")], [])


class Index:
    """As an integer of NumPy."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def is_plain(value: Any) -> bool:
    if is_dataclass(value):
        return all(map(is_plain, vars(value).values()))
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("integer", [Index, torch.tensor])
@pytest.mark.parametrize("function", CLASSES, ids=named)
def test_integers_and_numbers_of_other_types_are_stored_as_python_s_own(function, integer):
    given = {}
    for name, p in parameters(function).items():
        value = REQUIRED.get(named(function), {}).get(name, p.default)
        if name in INTEGERS and type(value) is int:
            given[name] = integer(value)
        elif name in NUMBERS and type(value) is float:
            given[name] = Fraction(value)
    built = call(function, given, mixed_model())
    if isinstance(built, Compressor):
        assert len(built.buckets) == (not isinstance(built, NoCompression))
        assert all(map(is_plain, built.options().values())), built
        assert repr(built) == repr(call(function, {}, mixed_model()))
        assert type(built.seed) is int and type(built.engine.comparison._timeout) is float
    elif not isinstance(built, LocalSteps):
        assert given and all(is_plain(getattr(built, name)) for name in given), vars(built)


#: Not compared by ranks: what each may choose, objects, and what the compared parameters show.
OWN = {"start_timeout", *OTHERS} - {"values", "dense_values", "exchange", "orthogonal"}
#: In place of a default of None.
IN_PLACE_OF_NONE = {"leaders": 2, "decay": 0.5, "subtract": 0.5, "values": "fp32", "mean_bits": 2}


@pytest.mark.parametrize(
    ("function", "name", "p"),
    [
        pytest.param(function, name, p, id=f"{named(function)}-{name}")
        for function in CLASSES
        if issubclass(function, Compressor) and function is not NoCompression  # on which few of them have an effect
        for name, p in parameters(function).items()
        if name not in OWN and p.default is not p.empty
    ],
)
def test_ranks_compare_every_argument_of_a_method(function, name, p):
    """What is not compared would silently differ, and so would what the ranks compute."""
    if type(p.default) is bool:
        other: Any = not p.default
    elif isinstance(p.default, str):
        other = {"fp32": "fp16", "ring": "gather", "fp32-gather": "fp16-gather"}.get(p.default, "fp32")
    else:
        other = IN_PLACE_OF_NONE[name] if p.default is None else (p.default or 1) / 2
        other = p.default + 1 if name in INTEGERS and p.default is not None else other
    signs = {"sign": False} if (function, name) == (hvd_compress.DeMo, "momentum") else {}
    first, second = (_configuration(call(function, {**signs, **given}, mixed_model())) for given in ({}, {name: other}))
    assert first != second


def test_arguments_in_an_attribute_are_refused():
    """Version 0.1 compared them."""

    class Old(hvd_compress.TopK):
        def __init__(self, named_parameters: Any, factor: float, **options: Any) -> None:
            self.arguments = factor
            super().__init__(named_parameters, **options)

    with pytest.raises(TypeError, match=r"self\.arguments is not read: list in options\(\)"):
        alone(Old, factor=0.5)


@pytest.mark.parametrize(
    ("nodes", "error"),
    [("1", TypeError), (1.0, TypeError), (None, TypeError), (float("nan"), TypeError), (0, ValueError)],
)
def test_nodes_that_are_no_number_are_refused(nodes, error):
    with pytest.raises(error, match=r"^nodes must .*got "):
        alone(nodes=nodes)


def test_one_node_is_also_true():
    with pytest.warns(UserWarning, match="on one node"):
        world = ThreadWorld(2)
        assert [NoCompression(mixed_model(), nodes=n, collectives=world.collectives(0)) for n in (True, Index(1))]
    assert alone(nodes=False).engine.nodes.inside is None


@pytest.mark.parametrize("orthogonal", [1, 0, None, 0.5, "all", [1], [[]], [torch.nn.Parameter(torch.ones(1))]])
def test_orthogonal_that_is_neither_a_bool_nor_names_is_refused(orthogonal):
    with pytest.raises(TypeError, match=r"^orthogonal must be a bool"):
        alone(hvd_compress.DeMo, orthogonal=orthogonal)


@pytest.mark.parametrize("density", [float, "0.1", None])
def test_what_is_neither_a_density_nor_a_schedule_is_refused(density):
    with pytest.raises(TypeError, match="density must be a number or a function of the step"):
        alone(hvd_compress.IWP, density=density)
    with pytest.raises(ValueError, match="density must be a finite number, above 0 and at most 1, got 1000"):
        alone(hvd_compress.IWP, density=10**400)


@pytest.mark.parametrize("rate", [0.1, "0.1", None])
def test_a_learning_rate_that_is_no_function_is_refused(rate):
    with pytest.raises(TypeError, match="rate must be a function"):
        schedule.diminishing(0.1, rate, 0.1)
    with pytest.raises(ValueError, match="the learning rate must be a finite number, at least 0, got nan"):
        schedule.diminishing(0.1, partial(float, "nan"), 0.1)(0)
