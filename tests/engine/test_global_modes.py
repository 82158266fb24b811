"""torch's modes around a compressor change nothing: averages and state are bit-equal to those without modes."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from harness import on_hosts_in_turn, replicas
from methods import KINDS, SMALL
from models import gradients, mixed_model
from torch import Tensor

from hvd_compress import IWP, LocalSteps, TopK, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs import codebooks, lanes
from hvd_compress.engine.state import same
from hvd_compress.papers import predictor


@dataclass(frozen=True)
class Modes:
    """``inference`` is on between steps only."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    autocast: torch.dtype | None = None
    inference: bool = False
    deterministic: bool = False
    grad: bool = True
    anomaly: bool = False

    @contextmanager
    def of_process(self) -> Iterator[None]:
        dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with torch.autograd.set_detect_anomaly(self.anomaly):
                yield
        finally:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(deterministic)

    @contextmanager
    def of_thread(self, in_step: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference and not in_step))
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=bool(self.autocast)))
            yield


COMBINATIONS = {
    "float64": Modes(dtype=torch.float64),
    "bfloat16, inference": Modes(dtype=torch.bfloat16, inference=True),
    "meta, autocast, deterministic": Modes(device="meta", autocast=torch.bfloat16, deterministic=True),
    "float16, meta, autocast, inference, no autograd": Modes(
        torch.float16, "meta", torch.float16, inference=True, grad=False, anomaly=True
    ),
}
every_combination = pytest.mark.parametrize("modes", COMBINATIONS.values(), ids=list(COMBINATIONS))


def forget_tables() -> None:
    """What is computed once and kept is computed under the modes."""
    for cached in (codebooks.codebook, codebooks.codebook_on, lanes.grid_step, predictor.shipped):
        cached.cache_clear()


def train(build: Any, host: str, modes: Modes, graph: bool = False) -> list[Any]:
    """Steps, and between them everything that may be called there. Returns all averages, states and residuals.
    ``graph``: the gradients have a graph, as those of ``backward(create_graph=True)``."""
    forget_tables()

    def built(*args: Any, **kwargs: Any) -> Any:
        with modes.of_thread():
            return build(*args, **kwargs)

    def step(i: int) -> list[Tensor]:
        grads = gradients(ranks[i].model, 100 * ranks[i].steps + i)
        grads = [g.requires_grad_() * 1.0 for g in grads] if graph else grads
        with modes.of_thread(in_step=True):
            return [g.detach().clone() for g in ranks[i].exchange(grads, shuffle=ranks[i].steps)]

    def between(i: int) -> Any:
        compression = ranks[i].compression
        with modes.of_thread():
            state = compression.state_dict()
            compression.load_state_dict(state)
            return [state, compression.residual("wide.weight"), compression.stats()["residual_norm"]]

    def discard(i: int) -> None:
        with modes.of_thread():
            ranks[i].compression.discard_step()

    model = mixed_model()
    with modes.of_process():
        world, ranks = replicas(2, built, model, host, **SMALL)
        found = [world.run(body) for body in (step, between, step, discard, step, between, step, between)]
        with modes.of_thread():
            return [found, reshard([found[-1][0][0], found[-1][1][0]])]


@lru_cache
def without_modes(name: str, host: str) -> list[Any]:
    return train(KINDS[name], host, Modes())


@on_hosts_in_turn
@pytest.mark.alternate("modes")
@pytest.mark.parametrize("name", list(KINDS))
@every_combination
def test_steps_are_bit_equal(modes: Modes, name: str, host: str) -> None:
    assert same(train(KINDS[name], host, modes), without_modes(name, host))


@pytest.mark.parametrize("name", list(KINDS))
def test_gradients_with_a_graph(name: str) -> None:
    """DDP copies gradients into buckets without one."""
    assert same(train(KINDS[name], "horovod", Modes(), graph=True), without_modes(name, "horovod"))


def local_training(modes: Modes, ordered: bool, unsent: str, build: Any) -> list[Any]:
    forget_tables()
    world, model = ThreadWorld(2, ordered=ordered), mixed_model()

    def body(i: int) -> Any:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        grads = [gradients(mine, seed=100 * step + i) for step in range(6)]
        with modes.of_thread():
            compression = build(mine.named_parameters(), collectives=world.collectives(i), **SMALL)
            local = LocalSteps(compression, optimizer, 2, unsent=unsent, outer_momentum=0.5, outer_lr=0.7)
            for step in range(6):
                for p, grad in zip(mine.parameters(), grads[step], strict=True):
                    p.grad = grad
                optimizer.step()
                local.step()
                if step == 3:
                    compression.load_state_dict(compression.state_dict())
            state = compression.state_dict()
            local.finish(mine)
        return [state, dict(mine.state_dict())]

    with modes.of_process():
        return world.run(body)


@pytest.mark.parametrize("ordered, unsent, name", [(False, "weights", "iwp"), (True, "buffer", "powersgd")])
@every_combination
def test_local_steps_are_bit_equal(modes: Modes, ordered: bool, unsent: str, name: str) -> None:
    found = local_training(modes, ordered, unsent, KINDS[name])
    assert same(found, local_training(Modes(), ordered, unsent, KINDS[name]))


@every_combination
def test_taking_momentum(modes: Modes) -> None:
    def run(modes: Modes) -> list[Any]:
        model = mixed_model()
        with modes.of_process():
            world, ranks = replicas(2, partial(TopK, density=1 / 16), model)
            optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.1, momentum=0.9) for r in ranks]

            def body(i: int) -> Any:
                compression = ranks[i].compression
                with modes.of_thread():
                    compression.take_momentum(optimizers[i])
                for step in range(3):
                    grads = gradients(ranks[i].model, seed=100 * step + i)
                    with modes.of_thread(in_step=True):
                        ranks[i].exchange(grads)
                with modes.of_thread():
                    return compression.state_dict()

            return world.run(body)

    assert same(run(modes), run(Modes()))


@every_combination
def test_a_new_set_of_ranks_seen_by_the_optimizer(modes: Modes) -> None:
    """The optimizer's hook is outside a step, and restarts the method."""

    def run(modes: Modes) -> list[Any]:
        model = mixed_model()
        with modes.of_process():
            old, ranks = replicas(2, KINDS["iwp-lloyd4"], model)
            optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.1) for r in ranks]
            found = []
            for world in (old, ThreadWorld(2)):
                for i, rank in enumerate(ranks):
                    rank.move_to(world, i)
                    with modes.of_thread():
                        optimizers[i].step()

                def step(i: int) -> list[Tensor]:
                    grads = gradients(ranks[i].model, seed=i)
                    with modes.of_thread(in_step=True):
                        return ranks[i].exchange(grads)

                found.append(world.run(step))
            return found

    assert same(run(modes), run(Modes()))


def test_shipped_networks_leave_torchs_generator_alone() -> None:
    forget_tables()
    before = torch.get_rng_state()
    predictor.shipped(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callers_modes_are_on_again() -> None:
    found = []

    class Probe(IWP):
        def dense_averaged(self, *args: Any) -> None:
            found.append(on())
            super().dense_averaged(*args)

    def on() -> tuple[bool, ...]:
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast

    rank = replicas(1, Probe)[1][0]
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu"):
            rank.exchange(gradients(rank.model, 0))
            rank.compression.reset()
            assert on() == (True, False, True, True)
            with torch.inference_mode():
                rank.compression.state_dict()
                assert on() == (False, True, True, True)
                with pytest.raises(KeyError):
                    rank.compression.residual("unknown")
                assert on() == (False, True, True, True)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert set(found) == {(False, False, False, False)}
