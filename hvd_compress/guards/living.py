"""The objects of a class that exist in this process, for models and optimizers that nobody tells a compressor of."""

import gc
from typing import Any

from ..engine.owner import in_use


def living(kind: type) -> list[Any]:
    """All objects of a class that are in use. By ``type()``: proxies pretend to be of other classes.

    Objects refer to their classes. Never by ``gc.get_objects()``: it would hold what other threads are making, and a
    tuple that is held while it is made ends in a ``SystemError`` there.
    """
    classes = [kind]
    for known in classes:  # grows meanwhile
        classes += type.__subclasses__(known)
    return in_use(lambda: [found for found in gc.get_referrers(*classes) if issubclass(type(found), kind)])
