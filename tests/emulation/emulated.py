"""A pytest plugin: ``hvd_compress`` loads the extension whose path is in ``OPERATORS`` instead of its own."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=os.environ["OPERATORS"]) if name == "hvd_compress._C" else None


sys.meta_path.insert(0, Finder())
