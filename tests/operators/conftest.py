"""Operators are compared with their references on every device; without the extension, they are their references."""

import pytest
from checks import DEVICES, EMULATED

from hvd_compress import ops

#: By argument, the devices of a test that has it. ``unchecked``: those whose operators cannot check the contents of
#: index tensors, because the host would have to wait for the device.
PARAMETERS = {"device": DEVICES, "unchecked": DEVICES if EMULATED else DEVICES[1:]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in PARAMETERS.keys() & metafunc.fixturenames:
        metafunc.parametrize(name, PARAMETERS[name])


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    if not ops.COMPILED:
        pytest.skip("the extension is not built")
