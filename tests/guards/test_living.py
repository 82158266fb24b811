"""Looking for models and optimizers that nobody told a compressor of."""

import threading

import pytest

from hvd_compress.guards.living import living


class Model:
    pass


class Derived(Model):
    pass


class Proxy:
    """Pretends to be a model."""

    __class__ = Model


def test_objects_of_derived_classes_are_found_and_no_others():
    made = type("Made", (Derived,), {})
    models, _proxy = [Model(), Derived(), made()], Proxy()
    assert {id(model) for model in living(Model)} == {id(model) for model in models}
    assert living(made) == models[2:]


def test_what_was_dropped_in_a_cycle_is_not_found():
    model = Model()
    model.itself = model
    del model
    assert not living(Model)


class Pausing(type):
    """A class that lets another thread work while objects are asked whether they are of it."""

    def __subclasscheck__(cls, subclass):
        cls.go_on.set()
        cls.thread.join(timeout=10)
        return super().__subclasscheck__(subclass)


MADE = {
    "a generator": lambda numbers: tuple(n for n in numbers),
    "a map": lambda numbers: tuple(map(str, numbers)),
    "pairs": lambda numbers: tuple(enumerate(numbers)),
    "of two": lambda numbers: dict(zip(("a",), (tuple(reversed(tuple(n for n in numbers))),), strict=True))["a"],
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_a_tuple_that_another_thread_is_making_is_left_alone(make):
    """Whoever holds it then ends it in "SystemError: bad argument to internal function"."""
    kind = Pausing("Kind", (), {})
    started, kind.go_on, made = threading.Event(), threading.Event(), []

    def numbers():
        for n in range(50):
            if n == 20:
                started.set()
                kind.go_on.wait(timeout=10)
            yield n

    kind.thread = threading.Thread(target=lambda: made.append(make(numbers())))
    kind.thread.start()
    found = kind()
    started.wait(timeout=10)
    assert living(kind) == [found]
    assert len(made) == 1 and len(made[0]) == 50
