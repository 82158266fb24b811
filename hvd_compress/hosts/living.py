"""The objects of a class that exist in this process: some are told to nobody."""

import gc
from typing import Any


def living(kind: type) -> list[Any]:
    """All of a class. The type is asked, since proxies pretend to be of other classes."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]
