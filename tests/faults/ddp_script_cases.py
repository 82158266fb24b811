"""Training scripts that only DistributedDataParallel allows, as users' reports show them: at density 1 the weights are
those without a compressor, or an error says what to do."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import job
import torch
from cases import Cases, refused, register
from job import DEVICE
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from hvd_compress import FFT, IWP, DeMo, TopK, ddp_hook

CASES: Cases = {}
case = register(CASES, named=True)
Build = Callable[..., Any]

#: Methods that send everything: of entries, of entries beside block means, of coefficients.
EXACT: dict[str, Build] = {
    "entries": lambda named: TopK(named, 1.0, min_numel=256),
    "means": lambda named: IWP(named, 1.0, values="fp32", min_numel=256),
    "spectrum": lambda named: FFT(named, 1.0, values="fp32", min_numel=256),
    "hadamard": lambda named: DeMo(named, 1.0, values="fp32", sign=False, decay=1.0, min_numel=256),
}


class Layers(nn.Module):
    """Of which a forward pass uses some. ``checkpointed``: "model", "layers" or both."""

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        return checkpoint(self.run, x, use, use_reentrant=True) if "model" in self.checkpointed else self.run(x, use)

    def run(self, x: Tensor, use: list[int]) -> Tensor:
        for layer in (self.layers[i] for i in use):
            x = (checkpoint(layer, x, use_reentrant=True) if "layers" in self.checkpointed else layer(x)).tanh()
        return x


class Training:
    """``ddp``, ``model``, ``optimizers``, ``compression`` (None: stock DDP), and this rank's data."""

    def __init__(
        self, model: nn.Module, build: Build | None, *lr: float, momentum: float = 0.0, **arguments: Any
    ) -> None:
        self.model = model.to(DEVICE)
        self.ddp = DistributedDataParallel(self.model, **arguments)
        self.compression = None
        if build is not None:
            self.compression = build(self.model.named_parameters())
            self.ddp.register_comm_hook(self.compression, ddp_hook)
        given = list(self.model.parameters())
        # Weights and biases by turns, if there are two optimizers.
        self.optimizers = [SGD(given[i :: len(lr)], rate, momentum=momentum) for i, rate in enumerate(lr)]
        self.data = torch.Generator().manual_seed(distributed.get_rank())

    def loss(self, *arguments: Any, module: nn.Module | None = None) -> Tensor:
        x = torch.randn(8, 32, generator=self.data).to(DEVICE)
        return (self.ddp if module is None else module)(x.requires_grad_(), *arguments).square().mean()

    def zero(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> Tensor:
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in self.model.parameters()]
        mine = torch.cat([part.detach().double().flatten() for part in parts])
        assert all(torch.equal(mine, other) for other in job.host.gather(mine)), "replicas differ"
        return mine


def assert_same(ours: Tensor, stock: Tensor, atol: float = 0.0) -> None:
    assert stock.isfinite().all() and stock.std() > 0
    torch.testing.assert_close(ours, stock, rtol=0, atol=atol)


# The end of a step.


def _layers(build: Build | None, used: list[list[int]], checkpointed: str = "", **arguments: Any) -> Tensor:
    training = Training(Layers(checkpointed), build, 0.1, bucket_cap_mb=0.003, **arguments)
    for use in used:
        training.zero()
        training.loss(use).backward()
        training.step()
    assert build is None or training.compression.step == len(used)
    return training.weights()


@case
def buckets_that_no_rank_uses():
    """DDP calls no hook for the first, the middle or the last bucket, or for several."""
    skip = dict(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for used in ([1, 2, 3], [0, 3], [0, 1, 2]), ([0], [3], [0, 1, 2, 3], [2]):
        for view in (False, True):
            arguments = dict(used=[*used, *used], gradient_as_bucket_view=view, **skip)
            assert_same(_layers(EXACT["entries"], **arguments), _layers(None, **arguments))


@case
def reentrant_backward_passes():
    """The step goes on after an inner pass with hooks, or its last hook is called there."""
    for checkpointed in "model", "layers", "model and layers":
        for arguments in dict(used=[[0, 1, 2, 3]] * 3), dict(used=[[0, 1, 2]] * 3, static_graph=True):
            arguments = dict(checkpointed=checkpointed, **arguments)
            assert_same(_layers(EXACT["entries"], **arguments), _layers(None, **arguments))


@case
def an_exception_in_the_users_hook():
    """DDP must be built anew; the compressor goes on."""
    training = Training(Layers(), lambda named: TopK(named, 1 / 8, min_numel=256), 0.1)
    outcomes = iter([False, False, True, False, False])

    def hook(grad: Tensor) -> None:
        if next(outcomes):
            raise ValueError("the user's")

    training.model.layers[1].weight.register_hook(hook)
    for _ in range(5):
        training.zero()
        try:
            training.loss([0, 1, 2, 3]).backward()
            training.step()
        except ValueError as error:
            assert "the user's" in str(error)
            training.compression.reset()
            training.ddp = DistributedDataParallel(training.model)
            training.ddp.register_comm_hook(training.compression, ddp_hook)
    assert training.weights().isfinite().all() and training.compression.step == 4


# Averages that come back as gradients.


def _twice(training: Training, between: Callable[[Training], object] = lambda _: None, **zeroed: Any) -> None:
    training.zero(**zeroed)
    training.loss().backward()
    between(training)
    training.loss().backward()
    training.step()


def _step(training: Training) -> None:
    training.loss().backward()
    training.step()


def _clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)


#: Steps in which the second backward pass adds to an average.
REENTERING: dict[str, Callable[[Training], None]] = {
    "two passes": _twice,
    "gradients zeroed in place": lambda t: _twice(t, set_to_none=False),
    "clipped between": lambda t: _twice(t, _clip),
    "one of two optimizers zeroes": lambda t: _twice(t, lambda t: t.optimizers[0].zero_grad()),
    "one of two optimizers steps and zeroes": lambda t: _twice(
        t, lambda t: (t.optimizers[1].step(), t.optimizers[1].zero_grad())
    ),
    "no pass zeroes": lambda t: (_step(t), _step(t)),
}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    # More parameters than an engine looks at.
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)), nn.Tanh())


@case
def averages_that_come_back():
    """Linear methods train on as stock DDP, others raise an error."""
    for script in REENTERING.values():
        for view in (False, True):
            options = dict(gradient_as_bucket_view=view)
            ours, stock = (Training(_network(), build, 0.1, 0.1, **options) for build in (EXACT["entries"], None))
            for training in (ours, stock):
                script(training)
                script(training)
            assert_same(ours.weights(), stock.weights())
        for build in (DeMo, lambda named: IWP(named, momentum=0.9, min_numel=256)):
            training = Training(_network(), build, 1e-3, 1e-3)
            with refused(RuntimeError, "the gradient contains the last average"):
                script(training)
                script(training)  # an optimizer is known once it has stepped


def _accumulated(training: Training) -> None:
    for last in (False, False, True):
        with nullcontext() if last else training.ddp.no_sync():
            training.loss().backward()
    training.step()
    training.zero(set_to_none=False)


def _gradients_for_a_log(training: Training) -> None:
    training.zero()
    training.loss().backward()
    torch.autograd.grad(training.loss(module=training.model), list(training.model.parameters()))
    training.step()


def _regularised(training: Training) -> None:
    training.zero()
    training.loss().backward()
    (1e-3 * sum(p.square().sum() for p in training.model.parameters())).backward()
    training.step()


def _skipped(training: Training) -> None:
    _step(training)
    training.zero()
    training.loss().backward()
    training.zero()


def _half_trained(training: Training) -> None:
    """Nobody zeroes or applies the gradients of the second half."""
    training.optimizers[0].zero_grad()
    training.loss().backward()
    training.optimizers[0].step()


def _closure(training: Training) -> None:
    def closure() -> Tensor:
        loss = training.loss()
        training.optimizers[0].zero_grad()
        loss.backward()
        return loss

    training.optimizers[0].step(closure)


@case
def gradients_that_contain_no_average():
    """No error, and linear methods train as stock DDP."""
    momentum = lambda named: IWP(named, 1.0, momentum=0.9, min_numel=256)  # noqa: E731
    for script in _accumulated, _gradients_for_a_log, _regularised, _skipped, _closure, _half_trained:
        for build in (DeMo, momentum, EXACT["entries"], None):
            rates = [0.1 if build in (EXACT["entries"], None) else 1e-3] * (2 if script is _half_trained else 1)
            training = Training(_network(), build, *rates)
            for _ in range(3):
                script(training)
            if build is EXACT["entries"]:
                ours = training.weights()
        assert_same(ours, training.weights())


# Complex parameters.


class Complex(nn.Module):
    """Gradients that are conjugated lazily, a scalar, a transposed and a channels_last parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 40), nn.Linear(40, 4)
        self.complex = nn.Linear(40, 40, dtype=dtype)
        self.turn = nn.Parameter(torch.tensor(1 + 1j))
        self.transposed = nn.Parameter(torch.randn(3, 4, 5, dtype=dtype).transpose(0, 2))
        self.conv = nn.Conv2d(4, 6, 3, dtype=dtype).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).to(self.complex.weight.dtype)
        z = z @ self.complex.weight.conj().T + self.complex(z) * self.turn
        image = x.reshape(8, 4, 8, 1).expand(-1, -1, -1, 4).to(z.dtype)
        return self.last(z.abs().float()) + 0.01 * (self.transposed.abs().sum() + self.conv(image).abs().mean()).float()


@case
def complex_parameters():
    for dtype, view in (torch.complex64, False), (torch.complex128, True):

        def run(build: Build | None, dtype: torch.dtype = dtype, view: bool = view) -> Tensor:
            training = Training(Complex(dtype), build, 0.05, momentum=0.9, gradient_as_bucket_view=view)
            for step in range(6):
                if build is not None and step == 0:
                    training.compression.take_momentum(training.optimizers[0])
                training.zero()
                _step(training)
            return training.weights()

        assert_same(run(EXACT["entries"]), run(None), atol=1e-6)


# Momentum by optimizer.


@case
def momentum_of_two_optimizers():
    """Taken from one or from both, in a transform's basis too: as the optimizers' own."""
    stock = _with_momentum(None, ())
    for taken in (0,), (0, 1):
        for build in EXACT.values() if len(taken) > 1 else [EXACT["entries"]]:
            assert_same(_with_momentum(build, taken), stock, atol=1e-6)


def _with_momentum(build: Build | None, taken: tuple[int, ...]) -> Tensor:
    torch.manual_seed(0)
    training = Training(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 24)), build, 0.05, 0.02, momentum=0.9)
    for number in taken:
        training.compression.take_momentum(training.optimizers[number])
    for _ in range(9):
        training.zero()
        _step(training)
    return training.weights()


# Process groups.


@case
def process_groups_of_model_and_compressor():
    """Each rank in a group of its own: ranks with equal weights, the same hook within the user's own."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    own = [distributed.new_group([member]) for member in range(size)][rank]

    def gradient(model_group: Any, group: Any, wrapped: bool = False) -> float:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False).to(DEVICE)
        ddp = DistributedDataParallel(model, process_group=model_group)
        compression = TopK(model.named_parameters(), 1.0, process_group=group)

        def hook(state, bucket):  # DDP checks annotations
            return ddp_hook(compression, bucket)

        ddp.register_comm_hook(*((None, hook) if wrapped else (compression, ddp_hook)))
        (ddp(torch.ones(1, 32, device=DEVICE)).sum() * (rank + 1)).backward()
        return float(model.weight.grad[0, 0])

    assert gradient(own, own) == gradient(own, own, wrapped=True) == rank + 1
    assert gradient(None, None) == (size + 1) / 2
    for model_group, group in (own, None), (None, own):
        for wrapped in (False, True):
            with refused(ValueError, "give both the same process_group="):
                gradient(model_group, group, wrapped)


@case
def copies_of_the_model():
    """The wrapper cannot be copied or saved, and the error says what can."""
    training = Training(Layers(), TopK, 0.1)
    training.loss([0, 1, 2, 3]).backward()
    for call in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
        with refused(TypeError, "model.module"):
            call(training.ddp)
        call(training.ddp.module)
