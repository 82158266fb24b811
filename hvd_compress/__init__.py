"""Gradient compression for data-parallel training with Horovod, torch DistributedDataParallel or FSDP2."""

from . import recipes, schedule, trainers
from ._version import __version__
from .carriers import default_collectives
from .checkpoints.convert import reshard
from .checkpoints.dcp import DCPState
from .hosts import host_of
from .hosts.ddp import ddp_hook
from .hosts.fsdp import register_fsdp_hooks
from .hosts.horovod import HorovodHost
from .hosts.loop import average_gradients
from .local.steps import LocalSteps
from .methods.base import Compressor, Surroundings
from .methods.demo import DeMo
from .methods.fft import FFT
from .methods.iwp import IWP
from .methods.matrices import hidden_matrices
from .methods.no_compression import NoCompression
from .methods.quantized import Quantized
from .methods.topk import TopK
from .papers.dgc import DGC
from .papers.mipd import MIPD
from .papers.mp2 import MP2
from .papers.powersgd import PowerSGD
from .papers.qsgd import QSGD
from .papers.slim_dp import SlimDP
from .papers.terngrad import TernGrad

Compressor.surround(Surroundings(default_collectives, host_of, HorovodHost))

__all__ = [
    "DGC",
    "FFT",
    "IWP",
    "MIPD",
    "MP2",
    "QSGD",
    "Compressor",
    "DCPState",
    "DeMo",
    "LocalSteps",
    "NoCompression",
    "PowerSGD",
    "Quantized",
    "SlimDP",
    "TernGrad",
    "TopK",
    "__version__",
    "average_gradients",
    "ddp_hook",
    "hidden_matrices",
    "recipes",
    "register_fsdp_hooks",
    "reshard",
    "schedule",
    "trainers",
]
