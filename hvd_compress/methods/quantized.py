"""Every entry, in a few bits: QSGD (Alistarh et al., 2017) and TernGrad (Wen et al., 2017)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs import Codec
from ..codecs.qsgd import Levels
from ..codecs.ternary import Ternary
from ..engine.exchange import Exchange
from ..selection.base import Selection
from .sparse import Plan, Sparse


class Quantized(Sparse):
    """A method that sends every entry of the gradient in few bits, without bias, and (in its paper) remembers nothing.

    Args:
        values: the codec that is the method.
        error_feedback: keep what the code lost for the next step. Not in the papers, and no gain where the loss is
            larger than the gradient itself, as with few levels: it then grows from step to step.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        values: Codec,
        error_feedback: bool = False,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(
            named_parameters,
            1.0,
            values=values,
            budget_interval=0,
            warmup_steps=0,
            momentum=momentum,
            **common,
        )
        self._feedback = error_feedback

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), self._feedback

    def __repr__(self) -> str:
        feedback = ", error feedback" if self._feedback else ""
        return f"{type(self).__name__}({self._codec.name}{feedback}{self.momentum_text()}; {self.parameters_text()})"

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        raise NotImplementedError("every entry is sent")

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        raise NotImplementedError("every entry is sent")

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        yield from super().communicate(bucket, plan)
        if not self._feedback:
            bucket.residual.zero_()
            plan.sent = False  # a step that is skipped is forgotten (but for what a momentum here keeps of it)

    def begin(self, bucket: Bucket) -> None:
        if not self._feedback:
            # What a step that failed had taken in.
            bucket.residual.zero_()
        super().begin(bucket)

    def _made_with(self) -> dict[str, Any]:
        return {**super()._made_with(), "error feedback": self._feedback}


class QSGD(Quantized):
    r"""QSGD: every entry as a random multiple of its run's norm, unbiased.

    Implements Alistarh, Grubic, Li, Tomioka & Vojnovic, *QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding* (NeurIPS 2017). With s levels, for every run of entries v of a rank's gradient::

        Q(v_j) = ||v|| sgn(v_j) xi_j / s      xi_j = floor or ceil of s |v_j| / ||v||, at random so that E Q(v) = v
        g      = mean_i Q(g_i)                one allgather

    Every rank sends its codes to all others, so bytes grow with the ranks: ``bits / 8 * (ranks - 1)`` an entry.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        bits: of an entry, 2 to 8, sign included: s = 2**(bits - 1) - 1.
        run: entries that share a norm (the paper's bucket size).
        norm: ``"l2"``, or ``"max"``, the paper's variant with less variance.
        error_feedback: keep what the code lost for the next step (not in the paper; with few levels it diverges).
        momentum: see :class:`~hvd_compress.IWP`.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        bits: int = 4,
        *,
        run: int = 512,
        norm: str = "l2",
        **options: Any,
    ) -> None:
        super().__init__(named_parameters, values=Levels(bits, run, norm), **options)


class TernGrad(Quantized):
    r"""TernGrad: every entry as -s, 0 or s, unbiased, with gradients clipped and the scale shared.

    Implements Wen, Xu, Yan, Wu, Wang, Chen & Li, *TernGrad: Ternary Gradients to Reduce Communication in Distributed
    Deep Learning* (NeurIPS 2017). For every parameter by itself::

        c_i = g_i clipped to clip standard deviations
        s   = max_i max |c_i|                         scaler sharing: 4 bytes a parameter, to all
        t_i = s sgn(c_i) b_i                          b_i = 1 with probability |c_i| / s, so that E t_i = c_i
        g   = mean_i t_i                              integers, added by Horovod's ring

    The sums of the ranks' -1, 0, 1 travel in lanes of ``2 + ceil(log2 ranks)`` bits.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        clip: in standard deviations (the paper's 2.5), above 0; None does not clip.
        error_feedback: keep what was lost for the next step, clipped parts included (not in the paper).
        momentum: see :class:`~hvd_compress.IWP`.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        clip: float | None = 2.5,
        **options: Any,
    ) -> None:
        if clip is not None and not clip > 0.0:
            raise ValueError(f"clip must be above 0, or None, got {clip}")
        super().__init__(named_parameters, values=Ternary(clip), **options)
