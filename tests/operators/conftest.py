"""Operators are compared with their references on every device; without the extension, they are their references."""

import pytest

from hvd_compress import ops


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``device``: every one. ``unchecked``: those whose operators cannot check the contents of index tensors, because
    the host would have to wait for the device."""
    # Not before pytest_configure() of tests/conftest.py, which sets the share of examples that checks.py reads.
    from checks import DEVICES, EMULATED

    parameters = {"device": DEVICES, "unchecked": DEVICES if EMULATED else DEVICES[1:]}
    for name in parameters.keys() & metafunc.fixturenames:
        metafunc.parametrize(name, parameters[name])


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    if not ops.COMPILED:
        pytest.skip("the extension is not built")
