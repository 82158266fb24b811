"""The members that most carriers have in common."""

from collections.abc import Callable

import torch

from ..engine.registry import Registry


class PlainCollectives:
    """Defaults of :class:`~hvd_compress.engine.collectives.Collectives`, which a carrier overrides where it differs:
    compressors are numbered apart, missing ranks are not known, and all ranks start the same collectives."""

    def registry(self) -> Registry:
        return Registry()

    def check_in(self) -> Callable[[], list[int]]:
        return list

    def may_differ(self, device: torch.device) -> bool:
        return False

    def realign(self) -> None:
        pass
