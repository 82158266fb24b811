"""FSDP2 as host: gradients are averaged by FSDP inside the shard group, and by the engine between the replicas.

After a module's reduce-scatter FSDP calls the all-reduce hook, writes the gradients of this rank's shards to ``.grad``,
in the parameter's dtype and without padding, and calls the parameters' post-accumulate hooks. There the engine takes
them. The averages are written into the same memory at the end of the backward pass.

Modules are reduced in the same order on all ranks, which matches the collectives. On Gloo, a bucket's first collective
starts when its last gradient arrives, the others at the end of backward. On NCCL nothing waits on the host: the hooks
run on FSDP's all-reduce stream, the exchanges on streams of their own, for which the stream of the backward pass waits
at its end. If FSDP reduces unused parameters, it may reduce a module twice: all exchanges then start at that end.

``set_requires_all_reduce(False)`` has no effect in FSDP on a 1-D mesh. As FSDP does on a 2-D mesh, the gradients of
such a pass are kept apart and added to those of the module's next pass that is exchanged.
"""

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.shards import is_sharded, local, meshes
from ..gradients.step import GradScaler
from ..guards.averaging import ExchangingHook
from ..guards.sharding import check_gradient_is_averaged
from ..guards.unsharded import check_not_unsharded, check_resharded, groups_of, sharded_modules
from .fsdp_modules import ModuleHook, remember, remembered
from .nested import backward_depth, refuse_inside_backward
from .torch_host import TorchHost

_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)  # as in torch 2.13

_REPLACED = (
    "another all-reduce hook was set in the place of hvd_compress' own, so gradients would not be averaged between the "
    "replicas: call set_all_reduce_hook() before register_fsdp_hooks(), whose hook then calls it first"
)


def register_fsdp_hooks(model: torch.nn.Module, compression: Any) -> "FSDPHooks":
    """Lets a compressor exchange the gradients of an FSDP2 model between its replicas.

    FSDP averages gradients inside a shard group as always, and the compressor averages this rank's shards with the same
    shards of the other replicas (hybrid sharding, HSDP). Call it on all ranks, after ``fully_shard()`` on every block
    and on the model, with the shard dimension of a mesh::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        compression = hvd_compress.DeMo(model, process_group=mesh.get_group("replicate"))
        hvd_compress.register_fsdp_hooks(model, compression)

    The averages are complete when ``backward()`` returns; a parameter's own post-accumulate hooks run before that, and
    see the average of the shard group. In a step of several backward passes, all but the last run under
    ``model.set_requires_gradient_sync(False)``, or under ``model.set_requires_all_reduce(False)``: they are then
    reduced in the shard group and kept apart, as FSDP does on a 2-D mesh, and the last exchanges the sum. If a backward
    pass fails, and by ``model.reset_iter_state()``, what is kept apart is dropped: begin with the first pass again.

    An all-reduce hook that was set on a module before is called first, after each reduce-scatter. Hooks of another
    compressor on the same modules are removed.

    Args:
        model: the model that ``fully_shard()`` was applied to.
        compression: a compressor of its named parameters, built after ``fully_shard()``, with the group of the replicas
            as ``process_group``.

    Returns:
        A handle, whose ``remove()`` takes the hooks away.

    Raises:
        RuntimeError: the compressor's parameters are not sharded, or it belongs to
            :class:`~hvd_compress.LocalSteps`; inside a backward pass; in a backward pass, reentrant checkpointing, or
            another all-reduce hook that was set after this call.
        ValueError: no module is sharded; the model is unsharded, or was when the compressor was built; the shard group
            contains ranks of ``process_group``, as with a 2-D mesh, over which FSDP averages without compression; a
            trained parameter is not sharded or not the compressor's (if it is unfrozen later, in the backward pass); a
            module has several groups of parameters; the compressor is registered already; another one is registered
            on modules outside of this model, too.
    """
    refuse_inside_backward("register_fsdp_hooks()")
    check_resharded(model)
    check_not_unsharded(model, zip(compression.engine.names, compression.engine.parameters, strict=True))
    return cast(FSDPHost, compression.use(FSDPHost)).register(model)


class FSDPHooks:
    """The handle of :func:`register_fsdp_hooks`. Keeps nothing alive."""

    def __init__(self, host: "FSDPHost") -> None:
        self._host = weakref.ref(host)

    def remove(self) -> None:
        """Takes the hooks away: FSDP reduces as before them, and calls an all-reduce hook that was there again. What
        ``set_requires_all_reduce(False)`` has kept apart is dropped. The compressor may be registered again. Does
        nothing if the hooks were removed already. All ranks must call it. Raises ``RuntimeError`` in ``backward()``."""
        host = self._host()
        if host is not None and host.handle is self:
            host.remove()


class FSDPHost(TorchHost):
    """The FSDP2 hooks of one compressor.

    ``.grad`` during a backward pass, which begins with the first reduce-scatter: what it held before is set aside in
    ``_before``; FSDP writes this pass's gradients there, which are averaged in place. At the end, the averages are
    added to what was set aside.
    """

    registration = "hvd_compress.register_fsdp_hooks(model, compression)"
    bound = f"is bound to FSDP2, because its parameters are sharded: use {registration}"

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        super().__init__(engine, grad_scaler)
        #: The handle of what is registered now, and the modules and hooks.
        self.handle: FSDPHooks | None = None
        self.modules = list[Any]()
        self._module_hooks, self._parameter_hooks = list[ModuleHook](), list[RemovableHandle]()
        #: The backward pass of the step in progress, or None.
        self._backward: int | None = None
        #: By parameter: its gradient before the backward pass, and the one that is being averaged.
        self._before = dict[int, Tensor]()
        self._grads = dict[int, Tensor]()
        #: By parameter that is not exchanged in this backward pass: its gradient, and the sum of earlier ones.
        self._apart = dict[int, Tensor]()
        self._partial = dict[int, Tensor]()
        #: The hook that ran last, and the hooks of this backward pass whose modules are exchanged.
        self._hook: ModuleHook | None = None
        self._exchanged = set[ModuleHook]()
        #: Whether a gradient may arrive twice in this backward pass: all are passed on at its end.
        self._deferred = False
        #: The streams on which gradients were made.
        self._streams = set[torch.cuda.Stream]()

    def register(self, model: torch.nn.Module) -> FSDPHooks:
        """See :func:`register_fsdp_hooks`."""
        engine, modules = self._engine, [module for _, module in sharded_modules(model)]
        if not modules:
            raise ValueError("no module is sharded: call fully_shard() on the model's blocks and on the model before")
        if self.handle is not None:
            raise ValueError(
                "this compressor is registered already: build one compressor for each model, or call remove() of what "
                "register_fsdp_hooks() has returned"
            )
        named = [*model.named_parameters(), *zip(engine.names, engine.parameters, strict=True)]
        numbers = {id(p): number for number, p in enumerate(engine.parameters)}
        for name, p in named:
            if p.requires_grad:
                self.check(name, p, id(p) in numbers)
        for module in modules:
            if len(groups_of(module)) > 1:
                raise ValueError(
                    f"a {type(module).__name__} has several groups of parameters: give all parameters of a module one "
                    "mesh (shard_placement_fn=)"
                )
        others = [cast(FSDPHost, method.clock) for method in remembered(modules)]
        for other in others:
            if not {*map(id, other.modules)} <= {*map(id, modules)}:
                raise ValueError(
                    "another compressor is registered on some of these modules and on others: call remove() of what "
                    "its register_fsdp_hooks() has returned before"
                )
        self.take_from("FSDP2's hooks")
        averages = self._average_inside()
        for other in others:
            other.remove()
        self._attach()
        try:
            for module in modules:
                for group in groups_of(module):
                    if all(hook.group is not group for hook in self._module_hooks):
                        self._module_hooks.append(ModuleHook(module, group, self._reduced, not averages))
            this = weakref.ref(self)
            for name, p in {id(p): (name, p) for name, p in named}.values():
                if p.is_floating_point() or p.is_complex():  # others cannot be trained
                    hook = _ParameterHook(this, name, numbers.get(id(p)), checked=p.requires_grad)
                    p.requires_grad_()
                    self._parameter_hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                    p.requires_grad_(hook.checked)
        except BaseException:
            self.remove()
            raise
        remember(modules, engine.method)
        self.handle, self.modules = FSDPHooks(self), modules
        return self.handle

    def remove(self) -> None:
        """See :meth:`FSDPHooks.remove`."""
        refuse_inside_backward("remove()")
        with self._engine.entered:
            if self._backward is not None:  # one that has failed
                self._reset()
            self._partial.clear()
            for hook in self._module_hooks:
                hook.remove()
            for handle in self._parameter_hooks:
                handle.remove()
            remember(self.modules, None)
            self.modules, self._module_hooks, self._parameter_hooks = [], [], []
            self.handle, self._hook, self.source, self.detached = None, None, None, True

    def begin_loop(self) -> None:
        for name, p in zip(self._engine.names, self._engine.parameters, strict=True):
            if p.requires_grad:
                self.check(name, p, ours=True)
        if not self._average_inside():
            raise ValueError(
                "reduce-scatter of this backend sums where FSDP asks for an average (pytorch issue 162338): use "
                "register_fsdp_hooks(), which lets FSDP divide"
            )
        self._attach()

    def _attach(self) -> None:
        """Gradients are passed in from now on."""
        if self.detached:  # what has become of the last average is not known
            self.clear()
        self.detached = False

    def _average_inside(self) -> bool:
        """Whether FSDP's averages inside the shard groups are averages. All ranks call it."""
        # A list: the ranks of every mesh take part.
        return all([reduces_to_averages(mesh) for mesh in meshes(self._engine.parameters)])

    def check(self, name: str, parameter: Tensor, ours: bool) -> None:
        """See :func:`check_gradient_is_averaged`."""
        check_gradient_is_averaged(name, parameter, ours, self._engine.collectives)

    # A backward pass.

    @modes_off
    def _reduced(self, hook: ModuleHook) -> None:
        """The all-reduce hook: FSDP is about to add a module's gradients to ``.grad``."""
        if self.handle is None:
            return  # removed, and called by a hook of the user's in its place
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._begin_backward(backward)
        self._hook = hook
        if hook.all_reduces:
            self._exchanged.add(hook)

    def _begin_backward(self, backward: int) -> None:
        """Begins a backward pass: sets aside what is in ``.grad``."""
        if backward_depth() > 1:
            raise RuntimeError(
                "hvd_compress does not support a backward pass inside another one with FSDP: checkpoint with "
                "use_reentrant=False"
            )
        for hook in self._module_hooks:
            if hook.replaced:
                raise RuntimeError(f"{hook.name}: {_REPLACED}")
        if self._backward is not None:
            self._failed(self._backward)
        for hook in self._module_hooks:
            if hook.discarded:
                self._clear_kept(hook)
        self._backward = backward
        self._deferred = any(hook.reduces_unused for hook in self._module_hooks)
        for number, p in enumerate(self._engine.parameters):
            if is_sharded(p) and p.grad is not None:
                self._before[number], p.grad = p.grad, None
        # After FSDP's own callback, which reduces the gradients of the last modules. If backward fails, autograd drops
        # it instead of calling it.
        end = self._end_of_backward
        weakref.finalize(end, self._failed, backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def arrived(self, name: str, number: int, grad: Tensor) -> None:
        """Called by the parameter's hook with the gradient of this rank's shard. It stays in ``.grad`` for the user's
        own hooks, and FSDP may add to it there."""
        hook = self._hook
        if hook is None or torch._C._current_graph_task_id() != self._backward:
            raise RuntimeError(f"{name}: {_REPLACED}")
        if grad.is_cuda:
            self._streams.add(torch.cuda.current_stream(grad.device))
        if not hook.all_reduces:
            self._apart[number] = grad
            hook.kept.add(number)
            return
        self._grads[number] = grad
        if not self._deferred:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        with self.inside():
            earlier = self._partial.pop(number, None)
            if earlier is not None:
                local(earlier).add_(local(self._grads[number]))
                self._grads[number] = earlier
            self.arrive(number, local(self._grads[number]), self._before.get(number))

    @modes_off
    def _end_of_backward(self) -> None:
        with self.inside():
            for stream in self._streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            for number in sorted(self._grads, reverse=True) if self._deferred else ():
                self._pass_on(number)
            left = {n for hook in self._exchanged for n in hook.kept} & {*self._partial}  # not used in this pass
            for number in sorted(left, reverse=True):
                self._grads[number] = self._partial.pop(number)
                self._pass_on(number)
            for number in {*self._before, *self._grads, *self._apart}:
                self._engine.parameters[number].grad = self._before.get(number, self._grads.get(number))
            if self._grads:
                self.exchange()
            for number in self._before.keys() & self._grads.keys():
                local(self._before[number]).add_(local(self._grads[number]))
            for number, grad in self._apart.items():
                if (earlier := self._partial.setdefault(number, grad)) is not grad:
                    local(earlier).add_(local(grad))
            for hook in self._exchanged:
                hook.kept.clear()
            for hook in self._module_hooks:
                hook.keep()
            self._clear()

    @modes_off
    def _failed(self, backward: int) -> None:
        """Resets a backward pass if it is still in progress."""
        with self._engine.entered:
            if backward == self._backward:
                self._reset()

    def _reset(self) -> None:
        """Restores ``.grad`` as it was before the backward pass, and drops what earlier passes have kept apart, of
        which a part may have been passed on: the step begins again."""
        self.reset()
        for number in {*self._before, *self._grads, *self._apart}:
            self._engine.parameters[number].grad = self._before.get(number)
        for hook in self._module_hooks:
            self._clear_kept(hook)
        self._clear()

    def _clear_kept(self, hook: ModuleHook) -> None:
        """Drops what is kept apart of a module."""
        for number in hook.kept:
            self._partial.pop(number, None)
        hook.kept.clear()
        hook.keep()

    def _clear(self) -> None:
        self._backward, self._hook = None, None
        self._before, self._grads, self._apart = {}, {}, {}
        self._exchanged.clear()
        self._streams.clear()


@dataclass(frozen=True, eq=False)
class _ParameterHook(ExchangingHook):
    """The post-accumulate hook of one parameter.

    ``host``: a weak reference, since Python's garbage collector cannot look into autograd's hooks. ``number``: of the
    parameter in the compressor, if it has it. ``checked``: whether :meth:`FSDPHost.check` has seen the parameter; it
    does not see frozen ones.
    """

    host: "weakref.ref[FSDPHost]"
    name: str
    number: int | None
    checked: bool

    @property
    def exchanges(self) -> bool:
        return self.host() is not None

    @modes_off
    def __call__(self, parameter: torch.nn.Parameter) -> None:
        host, grad = self.host(), parameter.grad
        if host is None:
            return
        if not self.checked:
            host.check(self.name, parameter, self.number is not None)
        assert self.number is not None and grad is not None
        host.arrived(self.name, self.number, grad)


def reduces_to_averages(mesh: Any) -> bool:
    """Whether reduce-scatter averages where FSDP expects it, on all ranks of the mesh. Gloo's has summed instead
    (pytorch issue 162338)."""
    group = mesh.get_group(0)
    size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    ranks = torch.full((size,), float(rank), dtype=torch.float32, device=mesh.device_type)
    mean = torch.empty(1, dtype=torch.float32, device=mesh.device_type)
    try:
        _reduce_scatter(mean, ranks, op=distributed.ReduceOp.AVG, group=group)
    except distributed.DistError:  # of the connection
        raise
    except RuntimeError:  # not supported
        mean.fill_(-1.0)
    everywhere = (mean == (size - 1) / 2).int()
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group)
    return bool(everywhere)
