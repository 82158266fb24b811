"""Weights of all but the hidden matrices, and their optimizer's state, common to all ranks: they move by averaged
gradients alone, once a period."""

import torch
from torch import Tensor

from simulation import optimizers
from simulation.setting import Setting, Task


class Common:
    """The others' common weights w and common optimizer state between and at exchanges.

    In the k steps of a period with learning rates r_1, ..., r_k, each rank sums its gradients of the others. The
    exchange averages these sums over the ranks, in the few bits and with the error feedback of the rest: in place of
    the differences of weights, so that as many bytes are sent. The average gradient of a step is g = average / k. With
    U(g) the optimizer's update, which moves its state, and decay d:

    - ``"once"``: w = w prod_j (1 - r_j d) - (r_1 + ... + r_k) U_k(g), where U_k raises momentum and betas to the power
      of k (``steps`` of :meth:`optimizers.Sign.update` and of :meth:`optimizers.AdamW.update`).
    - ``"replay"``: for j = 1, ..., k: w = w (1 - r_j d) - r_j U(g).

    Between exchanges, the weights of each rank are w and, unless ``own`` is None, move by steps of their optimizer that
    begin with the common state and are dropped, with their state, at the exchange. These steps are by
    own g_i + (1 - own) p: g_i is the rank's own gradient, and p the one that the rank's momentum predicts,
    (1 - momentum) v of the sign of the momentum, the corrected first moment of AdamW. With own = ranks ** -0.5 the
    noise of own g_i is as large as that of an average over the ranks.

    Args:
        like: the others' weights, (runs, ranks, entries).
    """

    def __init__(self, setting: Setting, task: Task, like: Tensor) -> None:
        self._setting = setting
        self._common = optimizers.others(task, like[:, 0])
        self._local = None if setting.own is None else optimizers.others(task, like)
        #: Of the gradients since the last exchange: (runs, ranks, entries).
        self.sums = torch.zeros_like(like, memory_format=torch.contiguous_format)

    def update(self, gradient: Tensor) -> Tensor:
        """That between exchanges, of each rank."""
        self.sums += gradient
        own = self._setting.own
        if self._local is None or own is None:
            return torch.zeros_like(gradient)
        return self._local.update(gradient if own == 1 else self._local.predicted().lerp_(gradient, own))

    def step(self, weights: Tensor, average: Tensor, rates: Tensor, decay: Tensor) -> None:
        """Moves the common weights, (runs, entries), in place, and begins a period.

        Args:
            average: of the sums, as received: (runs, entries).
            rates: of the period's steps: (steps, runs).
            decay: of each entry, times the learning rate.
        """
        steps = len(rates)
        gradient, rates = average / steps, rates[..., None]
        if self._setting.averages == "once":
            weights.mul_((1 - rates * decay).prod(0)).sub_(rates.sum(0) * self._common.update(gradient, steps))
        else:
            for rate in rates:
                weights.mul_(1 - rate * decay).sub_(rate * self._common.update(gradient))
        self.sums.zero_()
        if self._local is not None:
            self._local.load(self._common)
