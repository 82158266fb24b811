"""Every entry, in a few bits and without bias: QSGD (Alistarh et al., 2017) and TernGrad (Wen et al., 2017)."""

from typing import Any

from ..codecs.qsgd import Levels
from ..codecs.ternary import Ternary
from ..engine.arguments import NamedParameters
from .every_entry import EveryEntry


class QSGD(EveryEntry):
    r"""QSGD: every entry as a random multiple of the norm of its run, unbiased.

    Implements Alistarh, Grubic, Li, Tomioka & Vojnovic, *QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding* (NeurIPS 2017). On rank i, for every run v of g_i, with L = 2**(bits - 1) - 1 levels::

        x_j    = L |v_j| / ||v||                  ||v||: the l2 norm
        q_j    = x_j rounded up or down at random, so that E q_j = x_j
        Q(v_j) = ||v|| sgn(v_j) q_j / L
        g      = mean_i Q(g_i)                    one allgather of norms and codes

    Ours: codes of fixed length, where the paper's Elias code is shorter if most entries are 0 (collectives have
    constant size here); error feedback.

    The bytes grow with the ranks: ``bits / 8 * (ranks - 1)`` an entry.

    Example::

        compression = hvd_compress.QSGD(model, bits=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        bits: per entry, 2 to 8, with the sign.
        run: entries that share a norm (the paper's bucket size).
        error_feedback: keep the quantization error for the next step. Not in the paper; diverges where the error is
            larger than the gradient, as with few levels.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(self, named_parameters: NamedParameters, bits: int = 4, *, run: int = 512, **options: Any) -> None:
        super().__init__(named_parameters, values=Levels(bits, run), **options)


class TernGrad(EveryEntry):
    r"""TernGrad: every entry as -s, 0 or s, unbiased, with gradients clipped and the scale shared.

    Implements Wen, Xu, Yan, Wu, Wang, Chen & Li, *TernGrad: Ternary Gradients to Reduce Communication in Distributed
    Deep Learning* (NeurIPS 2017). On rank i, for each parameter::

        s   = max_i min(max |g_i|, clip rms(g_i))     shared scale: 4 bytes a parameter from every rank to all
        t_i = s sgn(g_i) b_i                          b_i = 1 with probability min(|g_i| / s, 1), else 0
        g   = mean_i t_i                              integers in lanes of 2 + ceil(log2 ranks) bits, one allreduce

    Ours: the root mean square as standard deviation, with the zeros that pad a parameter to blocks of 256; a shared
    scale always; error feedback.

    Example::

        compression = hvd_compress.TernGrad(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        clip: in standard deviations (the paper's 2.5), above 0.
        error_feedback: keep the quantization error, clipped parts included, for the next step (not in the paper).

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(self, named_parameters: NamedParameters, *, clip: float = 2.5, **options: Any) -> None:
        super().__init__(named_parameters, values=Ternary(clip), **options)
