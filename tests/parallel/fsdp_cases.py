"""FSDP2 on real ranks: with nothing left out, steps are those of FSDP's own hybrid sharding.

The settings are the scenarios of torch's own tests, written anew: test/distributed/_composable/fsdp/
test_fully_shard_{training,grad_acc,frozen,shared_params,clip_grad_norm_,mixed_precision}.py and
test/distributed/_composable/test_replicate_training.py.
"""

import gc
import itertools
import math
import re
import warnings
import weakref
from functools import partial
from typing import Any
from unittest import mock

import job
import pytest
import torch
from cases import Cases, register
from fsdp_job import Job, Net, draw_tokens, gather, mesh_of, rank, shard, shared_folder, size
from job import DEVICE
from methods import EXACT, FORGETFUL, METHODS, TRAINED, WITHOUT_RESIDUAL
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import hvd_compress
from hvd_compress.engine.shards import is_sharded, local
from hvd_compress.guards import averaging, sharding
from hvd_compress.hosts import fsdp
from hvd_compress.hosts.ddp import DDPHost
from hvd_compress.trainers import CombinedOptimizer

CASES: Cases = {}
BFLOAT16_REDUCTION = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
BFLOAT16_PARAMETERS = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
ON_THE_CPU = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
UNUSED_TWICE = {"model": {"twice": True}, "unused": True, "reduce_unused": True}
TIED_AND_CHECKPOINTED = {"model": {"tied": True, "checkpointed": True}}
#: Settings of a training that equals FSDP's own.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept_after_forward_and_clipped": {"reshard_after_forward": False, "clip": (0.1, 2.0)},
    "resharded_after_forward_and_clipped_by_the_sum": {"reshard_after_forward": True, "clip": (1.0, 1.0)},
    "accumulation": {"passes": 3},
    "accumulation_of_whole_parameters": {"passes": 3, "kept": True},
    "accumulation_of_bfloat16_reductions": {"passes": 3, **BFLOAT16_REDUCTION},
    "every_pass_averaged": {"passes": 3, "sync": "all"},
    "every_pass_averaged_of_one_block": {"passes": 3, "sync": "first"},
    "reduced_in_shards": {"passes": 3, "sync": "shards"},
    "reduced_in_shards_but_one_block": {"passes": 3, "sync": "shards_but_first", "to_none": False},
    "reduced_in_shards_at_last": {"passes": 3, "sync": "shards_at_last"},
    "reduced_in_shards_twice": {"passes": 3, "sync": "shards", **UNUSED_TWICE},
    "reduced_in_shards_in_bfloat16": {"passes": 3, "sync": "shards", **BFLOAT16_REDUCTION},
    "reduced_in_shards_on_the_cpu": {"passes": 2, "sync": "shards", **ON_THE_CPU},
    "zeroed_gradients_and_frozen_biases": {"to_none": False, "trained": "weight"},
    "bfloat16_reduction": BFLOAT16_REDUCTION,
    "bfloat16_parameters": BFLOAT16_PARAMETERS,
    "cpu_offload": ON_THE_CPU,
    "checkpointed": {"model": {"checkpointed": True}},
    "frozen": {"trained": "side"},
    "tied": {"model": {"tied": True}},
    "tied_and_checkpointed": TIED_AND_CHECKPOINTED,
    "blocks_used_twice": {"model": {"twice": True}},
    "meta_device": {"meta": True},
    "unused": {"unused": True},
    "unused_on_a_rank": UNUSED_TWICE,
    "foreach": {"optimizer": partial(torch.optim.AdamW, lr=1e-3, foreach=True)},
    "fused": {"optimizer": partial(torch.optim.AdamW, lr=1e-3, fused=True)},
    "one_shard": {"replicas": 4},
    "one_shard_of_everything": {"replicas": 4, "passes": 2, "trained": "weight", **TIED_AND_CHECKPOINTED},
}
#: Settings of which others are made.
PARTS = ("every_pass_averaged", "cpu_offload", "checkpointed", "tied", "one_shard")
#: Differences that are allowed, if not 1e-5.
TOLERANCES = {
    **dict.fromkeys(("foreach", "fused"), 1e-4),
    **{name: 1e-2 for name, setting in SETTINGS.items() if BFLOAT16_REDUCTION.items() <= setting.items()},
}
#: Signs are scaled so.
SIGN_SGD = partial(torch.optim.SGD, lr=1e-3)


def fsdp_has(name: str) -> bool:
    """Whether this torch has a method of ``FSDPModule``: 2.11 and 2.12 have fewer."""
    return hasattr(FSDPModule, name)


def _assert_same(ours: Job, native: Job, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.full(), native.full(), rtol=tolerance, atol=tolerance)


def _equals_hybrid_sharding(name: str) -> None:
    ours = Job(build=EXACT[job.family()], **SETTINGS[name])
    before = {name: weight.clone() for name, weight in ours.full().items()}
    ours.train(job.steps).assert_equal_replicas()
    _assert_same(ours, Job(**SETTINGS[name]).train(job.steps), TOLERANCES.get(name, 1e-5))
    assert any(not torch.allclose(before[name], weight, atol=1e-3) for name, weight in ours.full().items())


for _name, _setting in SETTINGS.items():
    if ON_THE_CPU.items() <= _setting.items() and DEVICE.type == "cuda":
        continue  # NCCL's process group has no CPU backend
    if "reduce_unused" not in _setting or fsdp_has("set_reduce_scatter_unused_params"):
        _run = partial(_equals_hybrid_sharding, _name)
        _run.__name__ = _name
        register(CASES, applies=lambda method: method in EXACT)(_run)


def _assert_equal(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """To the last bit."""
    torch.testing.assert_close(ours, others, rtol=0, atol=0)


def _gradients(run: Job) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in run.model.named_parameters() if p.grad is not None}


def _fail(*_: object) -> None:
    """As a hook."""
    raise ArithmeticError("in backward")


@register(CASES)
def replicas_stay_equal():
    Job(build=METHODS[job.method], replicas=2).train(job.steps).assert_equal_replicas()


@register(CASES, named=True)
def hundreds_of_steps():
    """More than any interval of a method."""
    Job(build=TRAINED[job.family()], optimizer=partial(torch.optim.SGD, lr=0.05)).train(200).assert_equal_replicas()


@register(CASES)
def conservation():
    """By shard, the sum over replicas of all gradients is what was applied plus the residuals."""
    given: dict[str, torch.Tensor] = {}

    def build(model, **options):
        for name, p in model.named_parameters():
            given[name] = torch.zeros_like(p.to_local(), dtype=torch.float64)
            p.register_post_accumulate_grad_hook(lambda p, name=name: given[name].add_(p.grad.to_local()))
        return METHODS[job.method](model, **options)

    trained = Job(build=build)
    applied = {name: torch.zeros_like(sum_) for name, sum_ in given.items()}
    for _ in range(job.steps):
        trained.backward()
        for name, p in trained.model.named_parameters():
            applied[name] += 2 * p.grad.to_local()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    rounds = "fp16" in METHODS[job.method].keywords.values()
    for name in given if job.method not in FORGETFUL else ():
        left = given[name] - trained.compression.residual(name)
        distributed.all_reduce(left, group=trained.mesh.get_group("replicate"))
        torch.testing.assert_close(applied[name], left, rtol=0, atol=1e-2 if rounds else 1e-4)
    stats = trained.compression.stats()
    assert stats["steps"] == job.steps and stats["total"]["wire_bytes"] > 0


PLAIN = partial(torch.optim.SGD, lr=0.01)


@register(CASES)
def by_a_loop():
    """Without hooks: the same averages."""
    build = METHODS[job.method]
    hooked, loop = (Job(build, optimizer=PLAIN, loop=loop).train(job.steps) for loop in (False, True))
    loop.assert_equal_replicas()
    _assert_equal(hooked.weights(), loop.weights())
    hooked.backward()
    with pytest.raises(RuntimeError, match="gradients from FSDP2's hooks, and now from average_gradients"):
        hvd_compress.average_gradients(hooked.compression)
    hooked.hooks.remove()
    hooked.optimizer.zero_grad()
    hooked.backward()
    hvd_compress.average_gradients(hooked.compression)
    with pytest.raises(RuntimeError, match=r"gradients from average_gradients\(\), and now from FSDP2's hooks"):
        hvd_compress.register_fsdp_hooks(loop.model, loop.compression)


@register(CASES, once=True)
def local_steps_of_matrices():
    """The other parameters are averaged in each step by another compressor, and equal in all replicas after each."""
    torch.manual_seed(0)
    model, mesh, data = Net(), mesh_of(2), torch.Generator().manual_seed(rank())
    shard(model, mesh["shard"])
    matrices, others = hvd_compress.hidden_matrices(model)
    between = {"process_group": mesh.get_group("replicate"), "min_numel": 64}
    own, common = PLAIN(matrices.values()), PLAIN(others.values())
    local = hvd_compress.recipes.low_bit(matrices.items(), own, 2, **between)
    every = hvd_compress.Quantized(others.items(), 8, **between)
    for step in range(1, 7):
        tokens = draw_tokens(data)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        hvd_compress.average_gradients(every)
        own.step()
        common.step()
        ended = local.step()
        assert ended == (step % 2 == 0)
        for group, equal in ((others, True), (matrices, ended)):
            mine = torch.cat([p.to_local().detach().flatten() for p in group.values()])
            everyone = gather(mine, mesh.get_group("replicate"))
            assert torch.equal(everyone[0], everyone[1]) == equal, (step, equal)


@register(CASES)
def distributed_checkpoint():
    """Saved on 2 x 2 ranks by torch.distributed.checkpoint: the same mesh resumes bit-exactly, others keep what
    replicas still owe."""
    owed = _saved_and_loaded(build=METHODS[job.method])
    assert job.method in WITHOUT_RESIDUAL or sum(float(tensor.abs().sum()) for tensor in owed.values()) > 0.1


@register(CASES, once=True)
def distributed_checkpoints_of_momentum():
    """Of all parameters, of uncompressed ones, and of the common weights between local steps."""
    for build in (partial(hvd_compress.IWP, density=1 / 16, momentum=0.9), hvd_compress.DeMo):
        owed = _saved_and_loaded(build=build)
        assert all(tensor.any() for what, tensor in owed.items() if "velocity of blocks.0.norm" in what)
    local = {"period": 2, "unsent": "buffer", "outer_lr": 0.7, "outer_momentum": 0.9}
    owed = _saved_and_loaded(build=partial(hvd_compress.TopK, density=1 / 16), local=local)
    assert owed["outer velocity of head.weight"].any()


def _saved_and_loaded(**settings: Any) -> dict[str, torch.Tensor]:
    """Returns what was owed."""
    make = partial(Job, optimizer=PLAIN, **settings)
    first = make().train(4)
    owed, data = first.owed(), first.data.get_state()

    def loaded(folder: str, **mesh: int) -> Job:
        other = make(**mesh)
        state = hvd_compress.DCPState(other.compression, saved_on=(2, size() // 2))
        dcp.load({"model": other.model, "compression": state}, checkpoint_id=folder)
        assert other.compression.step == first.compression.step
        torch.testing.assert_close(owed, other.owed(), rtol=1e-6, atol=1e-6)
        other.data.set_state(data)
        return other

    with shared_folder() as folder:
        state = first.compression.state_dict()
        with pytest.raises(ValueError, match=r"place_in_mesh: .* another rank of the shard group"):
            first.compression.load_state_dict({**state, "place_in_mesh": [1 - state["place_in_mesh"][0]]})
        state = {"model": first.model, "compression": hvd_compress.DCPState(first.compression)}
        dcp.save(state, checkpoint_id=folder)
        again, *others = (loaded(folder, **mesh) for mesh in ({}, {"replicas": size()}, {"replicas": 1}))
    _assert_equal(first.train(2).weights(), again.train(2).weights())
    for other in others:
        other.train(2).assert_equal_replicas()
    return owed


@register(CASES, once=True)
def checkpoints_that_would_lose_something():
    """Each is refused, on every rank."""
    local = {"period": 3, "unsent": "weights"}
    job = Job(build=partial(hvd_compress.TopK, density=1 / 16), local=local, optimizer=PLAIN).train(3)
    state = hvd_compress.DCPState(job.compression)
    with pytest.raises(RuntimeError, match=r"finish\(\)"):
        state.state_dict()
    job.local.finish(job.model)
    state.state_dict()
    job = Job(build=hvd_compress.IWP)
    job.backward()
    with pytest.raises(RuntimeError, match=r"after optimizer.step\(\)"):
        hvd_compress.DCPState(job.compression).state_dict()
    large = partial(hvd_compress.IWP, density=1 / 64)
    job = Job(build=large, optimizer=PLAIN).train(3)
    with shared_folder() as folder:
        dcp.save({"compression": hvd_compress.DCPState(job.compression)}, checkpoint_id=folder)
        smaller = Job(build=lambda model, min_numel, **options: large(model, min_numel=10**6, **options), replicas=1)
        state = hvd_compress.DCPState(smaller.compression, saved_on=(2, size() // 2))
        with pytest.raises(ValueError, match="is not compressed here"):
            dcp.load({"compression": state}, checkpoint_id=folder)
        with pytest.raises(RuntimeError, match=r"saved_on=\(2, 2\) is for loading, and nothing was loaded"):
            dcp.save({"compression": state}, checkpoint_id=folder)


@register(CASES, once=True)
def local_steps():
    """Gradients are averaged inside the shard groups only; replicas exchange how far their shards have come."""
    plain = partial(torch.optim.SGD, lr=0.05)
    ours = Job(build=EXACT["none"], optimizer=plain, local={"period": 1}).train(job.steps).assert_equal_replicas()
    _assert_same(ours, Job(optimizer=plain).train(job.steps))
    for unsent in ("weights", "buffer"):
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        settings = {"period": 3, "unsent": unsent, "outer_lr": 0.7, "outer_momentum": 0.9}
        ours = Job(build=partial(hvd_compress.TopK, density=1 / 16), optimizer=optimizer, local=settings)
        before = ours.weights()
        ours.train(7)  # one step after an exchange
        mine = torch.cat([w.flatten() for w in ours.weights().values()])
        one, other = gather(mine, ours.mesh.get_group("replicate"))
        assert not torch.equal(one, other)
        ours.local.finish(ours.model)
        ours.assert_equal_replicas()
        assert all(not torch.equal(before[name], w) for name, w in ours.weights().items() if w.numel())
        assert ours.compression.stats()["total"]["wire_ratio"] > 3


@register(CASES, once=True)
def averaged_gradients():
    """Replicas have the same weights and moments of each shard, also where others take local steps."""
    averaged: list[torch.optim.Optimizer] = []

    def combined(parameters: list[torch.nn.Parameter]) -> Any:
        averaged[:] = [torch.optim.AdamW(parameters[1::2], lr=1e-2)]
        return CombinedOptimizer([torch.optim.SGD(parameters[::2], lr=0.05), *averaged])

    settings = {"period": 3, "unsent": "buffer", "on_averaged_gradients": averaged}
    trained = Job(build=partial(hvd_compress.Quantized, bits=2), optimizer=combined, local=settings)
    before, group = trained.weights(), trained.mesh.get_group("replicate")
    names = [name for name, _ in trained.model.named_parameters()][1::2]
    for step in range(1, 8):
        trained.train(1)
        weights, states = trained.weights(), averaged[0].state.values()
        moments = [local(tensor).flatten() for state in states for tensor in state.values()]
        one, other = gather(torch.cat([*(weights[name].flatten() for name in names), *moments]), group)
        assert torch.equal(one, other) and bool(moments) == (step >= 3)
    assert all(not torch.equal(before[name], weights[name]) for name in names if weights[name].numel())
    trained.local.end(trained.model)
    trained.assert_equal_replicas()


@register(CASES, once=True)
def optimizers_where_local_steps_end():
    """Replicas have the same moments, of each shard its own."""
    job = Job(build=LOCAL, optimizer=partial(torch.optim.AdamW, lr=1e-2), local=EVERY_THIRD).train(4)
    group = job.mesh.get_group("replicate")

    def moments():
        return gather(torch.cat([local(s["exp_avg"]).flatten() for s in job.optimizer.state.values()]), group)

    apart = moments()
    assert not torch.equal(apart[0], apart[1])
    job.local.end(job.model)
    assert all(is_sharded(state["exp_avg"]) for state in job.optimizer.state.values())
    after = moments()
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], apart[0])
    job.assert_equal_replicas()


@register(CASES, once=True)
def restored_lengths():
    """Of whole tensors, not of each shard: replicas have the length of their differences."""
    plain, build = partial(torch.optim.SGD, lr=0.05), EXACT["none"]
    ours, alone = (
        Job(build=build, optimizer=plain, local=local)
        for local in ({"period": 1, "restore_length": True}, {"period": 100})
    )
    start = alone.full()
    ours.train(1).assert_equal_replicas()
    own = {name: weight - start[name] for name, weight in alone.train(1).full().items()}
    for name, weight in ours.full().items():
        differences = gather(own[name], ours.mesh.get_group("replicate"))
        mean, length = differences.mean(0), differences.flatten(1).norm(dim=1).square().mean().sqrt()
        factor = (length / mean.norm()).clamp(max=2**0.5)
        assert factor > 1.01, name
        torch.testing.assert_close(weight - start[name], mean * factor, rtol=1e-3, atol=2e-7)


@register(CASES, once=True)
def local_muon_steps():
    """Muon makes whole matrices of the shards inside the shard group."""

    def matrices(model: torch.nn.Module, **options: Any) -> Any:
        named = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
        return hvd_compress.TopK(named, density=1 / 16, **options)

    def muon(parameters: list[torch.nn.Parameter]) -> Any:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)

    trained = Job(build=matrices, optimizer=muon, local={"period": 2, "unsent": "buffer"})
    before = trained.weights()["head.weight"]
    trained.train(4).assert_equal_replicas()
    assert not torch.equal(before, trained.weights()["head.weight"])


@register(CASES, once=True)
def muon_on_averaged_gradients():
    """It makes whole matrices of shards, of 12 and 13 rows here, and both ranks of a group must take part: also where
    the first gradient of a rank is 0. In fragments they do not, as other shards are together on each rank."""
    averaged: list[torch.optim.Optimizer] = []

    def combined(kind: Any, parameters: list[torch.nn.Parameter]) -> Any:
        averaged[:] = [kind([p for p in parameters if p.dim() == 2], lr=0.02)]
        return CombinedOptimizer([torch.optim.SGD([p for p in parameters if p.dim() != 2], lr=0.05), *averaged])

    build = partial(hvd_compress.Quantized, bits=2, bucket_mb=5 / 1024)
    settings = {"period": 3, "unsent": "buffer", "on_averaged_gradients": averaged}
    trained = Job(build=build, optimizer=partial(combined, torch.optim.Muon), local=settings)
    before = trained.weights()["head.weight"]
    trained.backward()
    for p in trained.model.parameters() if rank() % 2 else ():
        local(p.grad).zero_()
    trained.optimizer.step()
    trained.local.step()
    trained.optimizer.zero_grad()
    trained.train(6)
    trained.local.end(trained.model)
    trained.assert_equal_replicas()
    assert not torch.equal(before, trained.weights()["head.weight"])
    settings["fragments"] = 3
    with pytest.raises(ValueError, match="Muon of on_averaged_gradients may need whole matrices"):
        Job(build=build, optimizer=partial(combined, torch.optim.Muon), local=settings)
    adamw = Job(build=build, optimizer=partial(combined, torch.optim.AdamW), local=settings).train(4)
    adamw.local.end(adamw.model)
    adamw.assert_equal_replicas()


@register(CASES, once=True)
def muon_of_shards():
    """torch's Muon steps shards as their whole matrix, to the rounding of its bfloat16, by up to 16 collectives."""
    mesh, data = mesh_of(2)["shard"], torch.Generator().manual_seed(0)
    for shape in ((64, 96), (96, 64), (25, 41)):
        weight, gradient = (torch.randn(shape, generator=data).to(DEVICE) for _ in range(2))
        whole = torch.nn.Parameter(weight.clone())
        shards = torch.nn.Parameter(distributed.tensor.distribute_tensor(weight, mesh, [Shard(0)]))
        whole.grad, shards.grad = gradient, distributed.tensor.distribute_tensor(gradient, mesh, [Shard(0)])
        torch.optim.Muon([whole], lr=0.02).step()
        with CommDebugMode() as collectives:
            torch.optim.Muon([shards], lr=0.02).step()
        assert collectives.get_total_counts() <= 16, shape
        difference, step = shards.full_tensor() - whole, whole - weight
        assert difference.norm() < 0.1 * step.norm(), shape


@register(CASES, once=True)
def gradients_that_are_summed():
    """Reduce-scatter that sums where FSDP asks for averages, as Gloo's has (pytorch issue 162338)."""
    real = fsdp._reduce_scatter

    def faulty(*arguments: Any, op: Any, **keywords: Any) -> Any:
        return real(*arguments, op=distributed.ReduceOp.SUM, **keywords)

    native = Job().train(job.steps)
    fsdp._reduce_scatter = faulty
    setattr(distributed, real.__name__, faulty)
    try:
        wrong = Job().train(job.steps)
        ours = Job(build=EXACT["none"]).train(job.steps).assert_equal_replicas()
    finally:
        fsdp._reduce_scatter = real
        setattr(distributed, real.__name__, real)
    assert not torch.allclose(wrong.full()["head.weight"], native.full()["head.weight"], rtol=1e-3)
    _assert_same(ours, native)


@register(CASES, once=True)
def agreement_on_sums():
    """If one rank's reduce-scatter sums, all of its group are told to; a lost connection is an error."""
    mesh = init_device_mesh(DEVICE.type, (2, size() // 2), mesh_dim_names=("replicate", "shard"))

    def faulty(output: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        real(output, *arguments, **keywords)
        if rank() == 0:
            output += 1.0

    def lost(*_: Any, **keywords: Any) -> None:
        raise distributed.DistBackendError("connection closed by peer")

    real, averages = fsdp._reduce_scatter, []
    for function in (real, faulty):
        with mock.patch.object(fsdp, "_reduce_scatter", function):
            averages.append(fsdp.reduces_to_averages(mesh["shard"]))
    assert averages == [True, rank() >= size() // 2]
    with mock.patch.object(fsdp, "_reduce_scatter", lost), pytest.raises(distributed.DistBackendError):
        fsdp.reduces_to_averages(mesh["shard"])


@register(CASES, once=True, applies=lambda method: fsdp_has("reset_iter_state"))
def a_failed_backward():
    """What was compressed before the failure is not lost, and the next step is complete."""
    trained = Job(build=partial(hvd_compress.IWP, density=1.0, values="fp32"))

    handle = trained.model.blocks[1].register_full_backward_pre_hook(_fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            trained.backward()
        trained.model.reset_iter_state()
        trained.optimizer.zero_grad()
    handle.remove()
    trained.backward()
    native = Job(passes=3, sync="all")
    native.backward()
    # All three have reached it.
    ours, theirs = (run.model.head.weight.grad.full_tensor() for run in (trained, native))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(p.grad is not None for p in trained.model.parameters())
    assert all(not trained.compression.residual(name).any() for name, _ in trained.model.named_parameters())
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.train(3).assert_equal_replicas()


@register(CASES, once=True, applies=lambda method: fsdp_has("reset_iter_state"))
def a_failed_second_pass():
    """The average of the pass before stays in the gradients, until it is zeroed."""
    trained, native = Job(build=EXACT["iwp"]), Job()

    for zeroed in (False, True):
        for run in (trained, native):
            run.optimizer.zero_grad()
            run.backward()
        before = _gradients(trained)
        handle = trained.model.blocks[0].register_full_backward_pre_hook(_fail)
        with pytest.raises(ArithmeticError):
            trained.backward()
        trained.model.reset_iter_state()
        handle.remove()
        _assert_equal(_gradients(trained), before)
        native.loss()
        for run in (trained, native):
            if zeroed:
                run.optimizer.zero_grad()
            run.backward()
        name = "blocks.0.up.weight"  # which the failed pass has not reached
        torch.testing.assert_close(_gradients(trained)[name], _gradients(native)[name], rtol=1e-5, atol=1e-6)


@register(CASES, once=True)
def frozen_at_first():
    """A parameter that is unfrozen later is averaged between the replicas, or refused if it is not the compressor's."""

    def freeze(model: torch.nn.Module) -> torch.nn.Module:
        for name, p in model.named_parameters():
            p.requires_grad_("side" in name)
        return model

    def of_the_trained(model: torch.nn.Module, **options: Any) -> Any:
        named = freeze(model).named_parameters()
        return hvd_compress.IWP([(name, p) for name, p in named if p.requires_grad], **options)

    ours, native = Job(build=lambda model, **options: EXACT["iwp"](freeze(model), **options)), Job()
    freeze(native.model)
    for run in (ours, native):
        run.train(2).model.requires_grad_(True)
        run.train(2)
    _assert_same(ours.assert_equal_replicas(), native)
    partly = Job(build=of_the_trained).train(1)
    partly.model.requires_grad_(True)
    with pytest.raises(ValueError, match="is not this compressor's"):
        partly.backward()


@register(CASES, once=True, applies=lambda method: fsdp_has("set_reduce_scatter_unused_params"))
def a_module_that_is_reduced_twice():
    """FSDP then reduces zeros of it first; signs stay signs."""
    for build in (hvd_compress.DeMo, EXACT["iwp"]):
        make = partial(Job, build=build, optimizer=PLAIN, model={"twice": True})
        once, twice = make().train(3), make(reduce_unused=True).train(3)
        _assert_equal(once.weights(), twice.weights())


def _assert_same_gradients(ours: Job, native: Job, scale: float = 1.0, only: str = "") -> None:
    theirs, mine = _gradients(native), {name: grad for name, grad in _gradients(ours).items() if only in name}
    want = {name: scale * theirs[name] for name in mine}
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


@register(CASES, once=True)
def passes_that_are_not_exchanged():
    """They begin no exchange and leave ``.grad``, in which an older average waits; the next one exchanges the sum,
    once."""
    ours, native = Job(build=EXACT["iwp"]), Job()
    for run in (ours, native):
        run.backward()
        run.model.set_requires_all_reduce(False)
        waiting = {name: (p.grad, p.grad.to_local().clone()) for name, p in run.model.named_parameters()}
        for _ in range(2):
            run.loss().backward()
        for name, p in run.model.named_parameters():
            assert p.grad is waiting[name][0] and torch.equal(p.grad.to_local(), waiting[name][1]), name
    stats = ours.compression.stats()
    assert stats["steps"] == 1
    for run in (ours, native):
        run.model.set_requires_all_reduce(True)
        run.loss().backward()
    assert ours.compression.stats()["steps"] == 2
    assert ours.compression.stats()["total"]["wire_bytes"] == 2 * stats["total"]["wire_bytes"] > 0
    _assert_same_gradients(ours, native)


@register(CASES, once=True)
def signs_of_a_sum():
    """DeMo's averages are those of the sum, as if the shard group had reduced once."""
    make = partial(Job, build=hvd_compress.DeMo, optimizer=SIGN_SGD, passes=3)
    once, often = make(), make(sync="shards", to_none=False)
    for _ in range(2):
        for run in (once, often):
            run.backward()
        assert once.compression.step == often.compression.step
        for (name, a), b in zip(_gradients(once).items(), _gradients(often).values(), strict=True):
            same = torch.isclose(a, b, rtol=1e-3, atol=1e-6)
            assert same.double().mean() > 0.95, name  # of values that are almost zero, a sign may turn
        for run in (once, often):
            run.optimizer.zero_grad()
    often.train(2).assert_equal_replicas()


@register(CASES, once=True)
def parameters_that_the_exchanged_pass_does_not_use():
    """What earlier passes have kept apart of them is exchanged with their module; of a module that is not used, later,
    as in FSDP."""

    def passes(run: Job, *used: bool) -> None:
        for side in used:
            tokens = draw_tokens(run.data)
            run.model(tokens, side=side).square().mean().backward()

    ours, whole = Job(build=EXACT["iwp"]), Job()
    ours.model.set_requires_all_reduce(False)
    whole.model.set_requires_gradient_sync(False)
    for run in (ours, whole):
        passes(run, True, True)
    ours.model.set_requires_all_reduce(True)
    whole.model.set_requires_gradient_sync(True)
    for run in (ours, whole):
        passes(run, False)
    assert "blocks.1.side.weight" in _gradients(ours)
    _assert_same_gradients(ours, whole)
    later, native = Job(build=EXACT["iwp"]), Job()
    x = torch.randn(4, 6, 25, generator=torch.Generator().manual_seed(rank())).to(DEVICE)
    for run in (later, native):
        run.backward()  # which says which module is the root
        run.optimizer.zero_grad()
        block = run.model.blocks[1]
        run.model.set_requires_all_reduce(False)
        run.loss().backward()
        run.model.set_requires_all_reduce(True)
        block.set_requires_all_reduce(False)
        run.loss().backward()
        assert block.up.weight.grad is None and run.model.blocks[0].up.weight.grad is not None
        block.set_requires_all_reduce(True)
        block(x, True).square().mean().backward()
    _assert_same_gradients(later, native)


@register(CASES, once=True)
def failures_between_passes():
    """After a failed backward pass, a failed forward pass and reset_iter_state(), or a failed exchange, the step begins
    again: what was kept apart is dropped, as in FSDP."""

    def failing(run: Job, where: str) -> Any:
        if where == "forward":
            return run.model.blocks[1].register_forward_pre_hook(_fail)
        return run.model.get_submodule(where).register_full_backward_pre_hook(_fail)

    for where, last in (("forward", False), ("head", True), ("blocks.1", False), ("blocks.1", True)):
        ours, native, whole = Job(build=EXACT["iwp"], passes=2, sync="shards"), Job(passes=2, sync="shards"), Job()
        for run in (ours, native):
            run.train(1).model.set_requires_all_reduce(False)
            run.loss().backward()
            run.model.set_requires_all_reduce(last)
            handle = failing(run, where)
            with pytest.raises(ArithmeticError):
                run.loss().backward()
            handle.remove()
            run.model.reset_iter_state()
            run.optimizer.zero_grad()
            run.backward()
        passed_on = "blocks.2" if last and where == "blocks.1" else None
        for part in {"blocks.0", "blocks.1", "blocks.2"} - {passed_on}:
            _assert_same_gradients(ours, native, only=part)
        if passed_on:  # what was compressed before the failure is sent with the next pass, once
            whole.passes = 2
            whole.train(1)
            for _ in range(4):
                whole.loss().backward()
            _assert_same_gradients(ours, whole, only="blocks.2.up.weight")
    ours, native = Job(build=EXACT["iwp"], passes=2, sync="shards"), Job(passes=2)
    ours.model.set_requires_all_reduce(False)
    ours.loss().backward()
    block = ours.model.blocks[0]
    block.set_requires_all_reduce(True)
    with mock.patch.object(ours.compression.engine, "finish", _fail), pytest.raises(ArithmeticError):
        block(torch.ones(1, 6, 25), True).sum().backward()  # FSDP has completed it
    ours.optimizer.zero_grad()
    native.data.set_state(ours.data.get_state())
    for run in (ours, native):
        run.backward()
    for part in ("blocks.1", "blocks.2"):
        _assert_same_gradients(ours, native, only=part)


def _replicas(run: Job) -> dict[str, Any]:
    return {"process_group": run.mesh.get_group("replicate"), "min_numel": 64}


@register(CASES, once=True)
def another_compressor():
    """It replaces the first, which takes no part any more and may come back."""
    ours, native = Job(build=hvd_compress.DeMo), Job()
    first, second = ours.compression, EXACT["iwp"](ours.model, **_replicas(ours))
    handle = hvd_compress.register_fsdp_hooks(ours.model, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "FSDP2-wrapped")
        ours.train(2)  # the momentum of its optimizer is none of DeMo's business
        third = EXACT["none"](ours.model, **_replicas(ours))
        hvd_compress.register_fsdp_hooks(ours.model, third)
        handle.remove()  # replaced already
        ours.train(1)
        hvd_compress.register_fsdp_hooks(ours.model, second)
        ours.train(2)
    assert (first.step, second.step, third.step) == (0, 4, 1)
    _assert_same(ours.assert_equal_replicas(), native.train(5))
    with pytest.raises(ValueError, match="registered already"):
        hvd_compress.register_fsdp_hooks(ours.model, second)
    hvd_compress.register_fsdp_hooks(ours.model, first)
    with pytest.raises(ValueError, match="momentum would count twice"):
        ours.train(1)


@register(CASES, once=True)
def a_refused_registration():
    """It leaves the hooks that are there."""
    ours, native = Job(build=EXACT["iwp"]), Job()
    blocks = EXACT["iwp"](ours.model.blocks.named_parameters(), **_replicas(ours))
    for model, text in ((ours.model, "is not this compressor's"), (ours.model.blocks, "on some of these modules")):
        with pytest.raises(ValueError, match=text):
            hvd_compress.register_fsdp_hooks(model, blocks)
    ours.train(2)
    assert (ours.compression.step, blocks.step) == (2, 0)
    _assert_same(ours, native.train(2))


@register(CASES, once=True)
def a_registration_that_fails():
    """It leaves no hooks, and the next one is as the first."""
    ours, native = Job(build=EXACT["iwp"], loop=True), Job()
    real, count = torch.Tensor.register_post_accumulate_grad_hook, itertools.count()

    def failing(parameter: torch.Tensor, hook: Any) -> Any:
        if next(count) == 5:
            raise MemoryError
        return real(parameter, hook)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.Tensor, real.__name__, failing), pytest.raises(MemoryError):
        hvd_compress.register_fsdp_hooks(ours.model, ours.compression)
    assert not averaging.hooked(ours.model.parameters())
    ours.hooks, ours.loop = hvd_compress.register_fsdp_hooks(ours.model, ours.compression), False
    _assert_same(ours.train(2), native.train(2))


@register(CASES, once=True)
def removed_hooks():
    """FSDP is as it was before them: also its reductions, and hooks of the user's own."""
    seen: list[int] = []

    def build(model: torch.nn.Module, **options: Any) -> Any:
        model.blocks[0].set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
        return hvd_compress.DeMo(model, **options)

    with mock.patch.object(fsdp, "reduces_to_averages", lambda mesh: False):
        ours = Job(build=build, optimizer=PLAIN)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in [ours.model, *ours.model.blocks]]
    parameters = list(ours.model.parameters())
    assert all(group.force_sum_reduction_for_comms for group in groups) and averaging.hooked(parameters[-1:])
    ours.backward()
    assert len(seen) == 1 and ours.compression.step == 1
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    ours.model.set_requires_all_reduce(False)
    ours.loss().backward()
    assert len(seen) == 2
    ours.hooks.remove()
    assert not any(group.force_sum_reduction_for_comms for group in groups) and not averaging.hooked(parameters)
    assert all(group._partial_reduce_output is None for group in groups)
    alone = Job(replicas=1)  # of all ranks
    ours.backward()
    assert len(seen) == 3 and ours.compression.step == 1
    mean = {
        name: gather(p.grad.to_local(), ours.mesh.get_group("replicate")) for name, p in ours.model.named_parameters()
    }
    assert any(not torch.equal(one, other) for one, other in mean.values())  # of one replica
    with torch.no_grad():
        full = ours.full()
        for name, p in alone.model.named_parameters():
            p.copy_(distributed.tensor.distribute_tensor(full[name], p.device_mesh, p.placements))
    alone.data.set_state(ours.data.get_state())
    for run in (ours, alone):
        run.optimizer.zero_grad()
        run.backward()
    for name, grad in _gradients(alone).items():
        p = ours.model.get_parameter(name)
        both = gather(p.grad.full_tensor(), ours.mesh.get_group("replicate")).mean(0)
        torch.testing.assert_close(both, grad, rtol=1e-4, atol=1e-6)


@register(CASES, once=True)
def a_removed_hook_that_a_later_one_calls():
    """It does nothing: gradients are added to those of the last pass, as FSDP does."""
    ours = Job(build=EXACT["iwp"])
    called = ours.model.blocks[0]._get_fsdp_state()._fsdp_param_group._all_reduce_hook
    ours.hooks.remove()
    ours.model.blocks[0].set_all_reduce_hook(called)
    ours.backward()
    first = {name: p.grad.to_local().clone() for name, p in ours.model.named_parameters()}
    ours.backward()
    for name, p in ours.model.named_parameters():
        assert not torch.equal(p.grad.to_local(), first[name]) or not first[name].numel(), name


@register(CASES, once=True)
def compiled_steps():
    """``torch.compile`` of a whole step, in which it must not compile what exchanges."""
    eager, ours = (Job(build=EXACT["iwp"]) for _ in range(2))
    step = torch.compile(ours.step, backend=job.apart)
    for _ in range(4):
        eager.step()
        step()
    _assert_same(ours, eager)


@register(CASES, once=True)
def removed_hooks_keep_nothing_alive():
    """No cycle is left: without Python's garbage collector, too."""
    ours = Job(build=EXACT["iwp"]).train(2)
    handle, alive = ours.hooks, weakref.ref(ours.compression)
    gc.disable()
    try:
        ours.compression = None
        assert alive() is not None and averaging.hooked(ours.model.parameters())  # the model keeps it
        handle.remove()
        assert alive() is None
    finally:
        gc.enable()
    ours.train(1)
    kept = EXACT["iwp"](ours.model, **_replicas(ours))
    hvd_compress.register_fsdp_hooks(ours.model, kept).remove()
    block = weakref.ref(ours.model.blocks[0])
    del ours
    gc.collect()
    assert block() is None and kept.step == 0


@register(CASES, once=True)
def hooks_and_backward_passes():
    """They are neither removed nor registered inside one; after a failed one they are."""
    ours, native = Job(build=EXACT["iwp"]), Job()
    other = EXACT["iwp"](ours.model, **_replicas(ours))

    acts = (lambda: hvd_compress.register_fsdp_hooks(ours.model, other), ours.hooks.remove)
    for act in acts:
        handle = ours.model.blocks[1].register_full_backward_pre_hook(lambda *_, act=act: act())
        with pytest.raises(RuntimeError, match="inside a backward pass"):
            ours.backward()
        handle.remove()
        ours.model.reset_iter_state()
        ours.optimizer.zero_grad()
        native.loss()
    for act in acts:
        act()
    for run in (ours, native):
        run.backward()
    assert (ours.compression.step, other.step) == (0, 1)
    _assert_same_gradients(ours, native, only="blocks.0")  # others contain gradients of the failed passes


@register(CASES, once=True)
def all_reduce_hooks_of_the_users_own():
    """One that was set before is called first; one that is set later would replace ours."""
    order: list[str] = []

    def doubled(flat: torch.Tensor) -> None:
        order.append("own")
        flat.mul_(2.0)

    def build(model: torch.nn.Module, **options: Any) -> Any:
        for module in (model, *model.blocks):
            module.set_all_reduce_hook(doubled)
        compression = EXACT["iwp"](model, **options)
        model.head.weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
        return compression

    ours, native = Job(build=build, passes=2, sync="shards"), Job(passes=2)
    for run in (ours, native):
        run.backward()
    assert order[0] == "own" and order.count("own") == 8
    _assert_same_gradients(ours, native, 2.0)
    for where in ("blocks.0", "blocks.1", ""):
        ours = Job(build=EXACT["iwp"])
        ours.model.get_submodule(where).set_all_reduce_hook(doubled)
        with pytest.raises(RuntimeError, match=r"set_all_reduce_hook\(\) before register_fsdp_hooks\(\)"):
            ours.backward()
    ours = Job(build=EXACT["iwp"])
    for module in (ours.model, *ours.model.blocks):
        module.set_all_reduce_hook(doubled)
    ours.compression = None
    gc.collect()
    with pytest.raises(RuntimeError, match=r"set_all_reduce_hook\(\) before register_fsdp_hooks\(\)"):
        ours.backward()
    ours.model.reset_iter_state()
    ours.optimizer.zero_grad()
    native = Job()
    native.loss()
    hvd_compress.register_fsdp_hooks(ours.model, EXACT["iwp"](ours.model, **_replicas(ours)))
    for run in (ours, native):
        run.backward()
    _assert_same_gradients(ours, native, 2.0, only="blocks.0")


@register(CASES, once=True)
def after_a_validation():
    """FSDP leaves the root unsharded: an error that says what to call."""
    for kept in (False, True):  # whether blocks stay unsharded, too
        ours = Job(build=EXACT["iwp"], reshard_after_forward=False if kept else None)
        plain = [(name, p) for name, p in ours.model.named_parameters()]
        ours.hooks.remove()
        with torch.no_grad():
            ours.loss()
        unsharded, options = [*ours.model.named_parameters()], _replicas(ours)
        assert any(a is not b for (_, a), (_, b) in zip(plain, unsharded, strict=True))
        for refused in (
            partial(hvd_compress.IWP, ours.model, **options),
            partial(hvd_compress.register_fsdp_hooks, ours.model, ours.compression),
            partial(sharding.check_sharded, ours.model),
        ):
            with pytest.raises(ValueError, match=r"model.reshard\(\)"):
                refused()
        late = hvd_compress.IWP(unsharded, **options)
        for module in (ours.model, *ours.model.blocks) if kept else (ours.model,):
            module.reshard()
        with pytest.raises(ValueError, match=r"model.reshard\(\)"):
            hvd_compress.register_fsdp_hooks(ours.model, late)
        sharding.check_sharded(ours.model)
        hvd_compress.register_fsdp_hooks(ours.model, ours.compression)
        ours.train(1)
    left_out = Net()
    fully_shard(left_out, mesh=ours.mesh["shard"], ignored_params={left_out.scale})
    with pytest.raises(ValueError, match="scale: is not sharded"):
        sharding.check_sharded(left_out)
    left_out.scale.requires_grad_(False)
    sharding.check_sharded(left_out)
    sharding.check_sharded(Net())


@register(CASES, once=True)
def hooks_of_the_users_own():
    """Run in backward with what this replica's gradient is, whether registered before or after."""
    seen: list[tuple[str, torch.Tensor]] = []

    def observe(model: torch.nn.Module) -> None:
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.to_local().clone())))

    def build(model: torch.nn.Module, **options: Any) -> Any:
        observe(model)
        return hvd_compress.DeMo(model, **options)

    trained = Job(build=build)
    observe(trained.model)
    trained.backward()
    assert len(seen) == 2 * len(list(trained.model.parameters()))
    for (name, before), (_, after) in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(before, after), name


@register(CASES, once=True)
def nothing_stays_alive():
    """A model that is dropped takes its compressor with it, even if one of its parameters stays."""
    trained = Job(build=hvd_compress.IWP).train(2)
    kept, *parameters = trained.model.parameters()
    watched = [weakref.ref(each) for each in (trained.model, trained.compression, *parameters)]
    del trained, parameters
    gc.collect()
    assert kept.requires_grad and not any(reference() is not None for reference in watched)


@register(CASES, once=True)
def discarded_steps():
    """What was sent in a step that is not applied is sent in the next one."""
    trained = Job(build=EXACT["iwp"])
    trained.backward()
    first = {name: p.grad.to_local().clone() for name, p in trained.model.named_parameters()}
    trained.compression.discard_step()
    trained.optimizer.zero_grad()
    trained.backward()
    second = trained.model.blocks[0].up.weight.grad.to_local().clone()
    assert not torch.allclose(second, first["blocks.0.up.weight"], atol=1e-6)
    alone = Job(build=EXACT["iwp"])
    alone.loss()
    alone.backward()
    expected = first["blocks.0.up.weight"] + alone.model.blocks[0].up.weight.grad.to_local()
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-6)


@register(CASES, once=True)
def averages_are_not_averaged_again():
    """Signs of signs: a second synchronised pass of a step is refused, where it would count twice."""
    trained = Job(build=hvd_compress.DeMo, optimizer=SIGN_SGD, passes=2, sync="all")
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(False\)"):
        trained.train(2)
    Job(build=hvd_compress.DeMo, optimizer=SIGN_SGD, passes=2).train(4).assert_equal_replicas()


@register(CASES, once=True)
def reentrant_checkpoints():
    """A backward pass inside another one: an error that says what to change."""
    trained = Job(build=hvd_compress.IWP)
    block, x = trained.model.blocks[0], torch.randn(4, 6, 25, requires_grad=True, device=DEVICE)
    trained.model.unshard()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        torch.utils.checkpoint.checkpoint(block, x, True, use_reentrant=True).sum().backward()


@register(CASES, once=True)
def mistakes():
    """Each is an error, on every rank, that says what to change."""
    mesh = init_device_mesh(DEVICE.type, (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    replicas = {"process_group": mesh.get_group("replicate")}

    def model(mesh: Any = mesh["shard"]) -> Net:
        built = Net()
        shard(built, mesh)
        return built

    hook, iwp = hvd_compress.register_fsdp_hooks, hvd_compress.IWP
    both, sharded, plain, left_out = model(mesh), model(), Net(), Net()
    fully_shard(left_out, mesh=mesh["shard"], ignored_params={left_out.scale})
    good, some = iwp(sharded, **replicas), iwp(sharded.blocks.named_parameters(), **replicas)
    demo = partial(hvd_compress.DeMo, orthogonal="matrices", min_numel=4, **replicas)
    for error, text, mistake in (
        (ValueError, "FSDP averages its gradient over the ranks", lambda: hook(both, iwp(both, **replicas))),
        (ValueError, "FSDP averages its gradient over the ranks", lambda: hook(sharded, iwp(sharded))),
        (ValueError, "and no nodes=", lambda: hook(sharded, iwp(sharded, nodes=mesh))),
        (RuntimeError, "are not sharded", lambda: hook(plain, iwp(plain, **replicas))),
        (ValueError, "no module is sharded", lambda: hook(plain, iwp(sharded, **replicas))),
        (ValueError, "is not this compressor's", lambda: hook(sharded, some)),
        (ValueError, "scale: is not sharded", lambda: hook(left_out, iwp(left_out, **replicas))),
        (RuntimeError, "register_fsdp_hooks", lambda: good.use(DDPHost)),
        (ValueError, "needs whole matrices.* use hvd_compress.recipes.low_bit", lambda: demo(sharded)),
    ):
        with pytest.raises(error, match=text):
            mistake()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
    assert any("register_fsdp_hooks(model, compression) missing" in str(warning.message) for warning in caught)
    hook(sharded, good)
    with pytest.raises(ValueError, match="registered already"):
        hook(sharded, good)


@register(CASES, once=True)
def orthogonal_averages_of_whole_matrices():
    """Where the shard group has one rank."""
    job = Job(build=partial(hvd_compress.DeMo, orthogonal="matrices"), replicas=size(), optimizer=SIGN_SGD, unused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "FSDP2-wrapped|DeMo: no gradients arrived")
        job.train(4).assert_equal_replicas()


def _compressor_on(mesh: tuple[int, ...], groups: dict[int, Any]) -> Any:
    """Of the replicas and shards of this mesh, in which replica i owes i + 1 of a weight; None on a rank outside it."""
    if len(mesh) > 1:
        compression = Job(build=hvd_compress.IWP, replicas=mesh[0]).compression
    elif rank() >= mesh[0]:
        return None
    else:
        torch.manual_seed(0)
        compression = hvd_compress.IWP(Net(), process_group=groups[mesh[0]], min_numel=64)
    place = compression.engine.place_of[compression.engine.names.index("head.weight")]
    place.work.set_residual(place.piece, torch.full(place.piece.shape, compression.collectives.rank + 1.0))
    return compression


@register(CASES, once=True)
def checkpoints_of_another_mesh():
    """Without ``saved_on``, or with a wrong one, every rank gets an error that says so, and the right one wherever the
    checkpoint could be read; with it, all meshes load the mean of what was owed."""
    groups = {count: distributed.new_group(list(range(count))) for count in (1, 2, 4)}
    meshes = [(1,), (2,), (4,), (1, 4), (2, 2), (4, 1)]
    compressors = {mesh: _compressor_on(mesh, groups) for mesh in meshes}
    with shared_folder() as folder:
        paths = {mesh: f"{folder}/{'x'.join(map(str, mesh))}" for mesh in meshes}

        def run(function: Any, mesh: tuple[int, ...], path: str, **options: Any) -> None:
            state = hvd_compress.DCPState(compressors[mesh], **options)
            group = groups[math.prod(mesh)]
            function({"compression": state}, checkpoint_id=path, process_group=group)

        for mesh, path in paths.items():
            if compressors[mesh] is not None:
                run(dcp.save, mesh, path)
        distributed.barrier()
        known = 0
        for (saved, path), mesh in itertools.product(paths.items(), meshes):
            if compressors[mesh] is None or saved == mesh:
                continue
            for given in (None, (3, 2), (1, 7), (1,)):
                says = given or mesh
                if tuple(says) == saved:
                    continue
                ranks = math.prod(mesh) if tuple(says) == mesh else 1
                if says[0] > saved[0] or ranks > math.prod(saved):
                    hint = re.escape("DCPState's saved_on= must be the mesh that saved, which saved_on=(1,) tells")
                    expected = pytest.raises(CheckpointException, match=f"Missing key.*{hint}")
                else:
                    right = re.escape(f"saved_on must be the mesh that saved, {saved}, and is {tuple(says)}")
                    expected = pytest.raises(ValueError, match=f"{right}, that of this job" if given is None else right)
                    known += 1
                with expected:
                    run(dcp.load, mesh, path, **({} if given is None else {"saved_on": given}))
                assert compressors[mesh].step == 0
            run(dcp.load, mesh, path, saved_on=saved)
            assert compressors[mesh].residual("head.weight").eq((saved[0] + 1) / 2).all()
        assert known > 20 or rank() > 1


LOCAL = partial(hvd_compress.Quantized, bits=2)
EVERY_THIRD = {"period": 3, "unsent": "buffer"}


@register(CASES, once=True)
def local_steps_beside_validations():
    """Between the optimizer's step and that of LocalSteps, with and without a delay: the root module, which stays
    whole after a forward pass, computes with the weights of after the exchange."""

    def outputs(run: Job) -> torch.Tensor:
        with torch.no_grad():
            return run.model(torch.arange(12).view(2, 6))

    for delay in (0, 1):
        run = Job(build=LOCAL, local={**EVERY_THIRD, "delay": delay})
        for step in range(7):
            run.backward()
            run.optimizer.step()
            if step == 6:
                run.local.finish(run.model)
            outputs(run)
            run.local.step()
            run.optimizer.zero_grad()
            mine = outputs(run)
            run.model.reshard()
            assert torch.equal(mine, outputs(run)), step
            run.model.reshard()
        run.local.finish()
        run.assert_equal_replicas()


@register(CASES, once=True)
def local_steps_that_would_average_twice():
    """Of native hybrid sharding, without a process group, with hooks, and of a model that is sharded later or not."""
    mesh = mesh_of(2)
    between = {"process_group": mesh.get_group("replicate"), "min_numel": 64}

    def build(mesh: Any = mesh["shard"], ignored: bool = False, **options: Any) -> Any:
        model = Net()
        shard(model, mesh, **({"ignored_params": {model.scale}} if ignored else {}))
        return hvd_compress.recipes.low_bit(model, PLAIN(model.parameters()), 2, **options)

    def hooked() -> Any:
        model = Job(build=LOCAL).model
        return hvd_compress.recipes.low_bit(model, PLAIN(model.parameters()), 2, **between)

    def sharded_later() -> Any:
        model = Net()
        local = hvd_compress.recipes.low_bit(model, PLAIN(model.parameters()), 2, **between)
        shard(model, mesh["shard"])
        local.take_weights()

    def unsharded() -> Any:
        model = Net()
        shard(model, mesh["shard"])
        model(torch.zeros(1, 2, dtype=torch.long))
        hvd_compress.recipes.low_bit(model, PLAIN(model.parameters()), 2, **between)

    for wrong, says in (
        (partial(build), r"process_group=mesh\.get_group\('replicate'\)"),
        (partial(build, mesh, **between), r"1-D mesh\['shard'\]"),
        (partial(build, mesh), r"1-D mesh\['shard'\]"),
        (partial(build, ignored=True, **between), "is not sharded"),
        (hooked, r"call remove\(\) of the handle"),
        (sharded_later, r"the model has other parameters"),
        (unsharded, r"call model\.reshard\(\)"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()


@register(CASES, once=True)
def local_steps_after_hooks_were_removed():
    run = Job(build=EXACT["iwp"])
    run.train(2)
    hvd_compress.register_fsdp_hooks(
        run.model, LOCAL(run.model, process_group=run.mesh.get_group("replicate"))
    ).remove()
    compression = LOCAL(run.model, process_group=run.mesh.get_group("replicate"), min_numel=64)
    run.local = hvd_compress.LocalSteps(compression, run.optimizer, **EVERY_THIRD)
    run.train(2)
    apart = gather(run.weights()["head.weight"], run.mesh.get_group("replicate"))
    assert not torch.equal(apart[0], apart[1]), "each replica takes steps of its own"
    run.train(1).assert_equal_replicas()


@register(CASES, once=True)
def buffers_are_those_of_all_ranks():
    """finish(model): within the shard group, too."""
    run = Job(build=LOCAL, local=EVERY_THIRD)
    run.model.norm = torch.nn.BatchNorm1d(3)
    run.model.norm.running_mean.fill_(float(rank()))
    run.model.register_buffer("queue", torch.full((2,), rank()))
    run.train(2)
    run.local.finish(run.model)
    assert run.model.norm.running_mean.tolist() == [(size() - 1) / 2] * 3
    assert run.model.queue.tolist() == [0, 0]
