"""Trainings that are evaluated and ended by other code than the trainer's own: endings.py FOLDER on two ranks.
Started by test_endings.py."""

import gc
import sys
import traceback
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from problem import data, equal_on_all_ranks, flat, net
from torch import distributed, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hvd_compress
from hvd_compress import recipes
from hvd_compress.guards.averaging import ddp_averages as averages
from hvd_compress.trainers import AccelerateLoop, TransformersCallback

CASES = {}
AT = (2, 5)


def case(function):
    CASES[function.__name__] = function
    return function


def collate(pieces):
    return {"x": torch.stack([x for x, _ in pieces]), "labels": torch.stack([label for _, label in pieces])}


def parameters(model):
    """Without the buffers, which DDP broadcasts before a forward pass."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trainer(folder, callbacks, model=None, kind=Trainer, **more):
    base = {
        "max_steps": 7, "per_device_train_batch_size": 8, "max_grad_norm": 0.0, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "ddp_find_unused_parameters": False,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**base, **more})
    return kind(
        model or net(), arguments, train_dataset=data(), eval_dataset=data(32), data_collator=collate,
        callbacks=callbacks,
    )  # fmt: skip


def local():
    return TransformersCallback(recipes.low_bit, period=4)


class When(TrainerCallback):
    """Calls ``does(trainer, control)`` in one of a callback's methods."""

    def __init__(self, method, does, at=AT):
        self.trainer, self._does, self._at = None, does, at
        setattr(self, method, self._call)

    def _call(self, args, state, control, **others):
        if state.global_step in self._at:
            self._does(self, control)


def evaluated(folder, user, kind=Trainer, **more):
    """All ranks evaluate one model, and end with one."""
    made = trainer(folder, [local(), user] if user else [local()], kind=kind, **more)
    if user:
        user.trainer = made
    evaluation_loop = made.evaluation_loop
    made.train()
    assert made.evaluation_loop == evaluation_loop
    assert made.model.evaluated and all(map(equal_on_all_ranks, made.model.evaluated))
    assert equal_on_all_ranks(flat(made.model))
    return made


def asks(user, control):
    control.should_evaluate = True


@case
def evaluation_set_in_on_optimizer_step(folder):
    evaluated(folder, When("on_optimizer_step", asks))


@case
def evaluation_of_several_data_sets_between_two_backward_passes(folder):
    does = When("on_substep_end", lambda user, control: user.trainer.evaluate({"a": data(16), "b": data(32)}))
    evaluated(folder, does, gradient_accumulation_steps=2)


@case
def evaluation_by_a_trainer_with_a_loop_of_its_own(folder):
    class Generates(Trainer):
        def evaluation_loop(self, *args, **options):
            with torch.no_grad():
                self.model.eval()(torch.ones(8, 16), torch.zeros(8, dtype=torch.long))
            return super().evaluation_loop(*args, **options)

    evaluated(folder, None, Generates, eval_strategy="steps", eval_steps=3)


@case
def evaluation_in_training_step(folder):
    class Looks(Trainer):
        def training_step(self, *args, **options):
            if self.state.global_step in AT:
                self.evaluate()
            return super().training_step(*args, **options)

    evaluated(folder, None, Looks)


@case
def prediction_in_on_save(folder):
    does = When("on_save", lambda user, control: user.trainer.predict(data(16)), range(9))
    evaluated(folder, does, save_strategy="steps", save_steps=3)


@case
def evaluation_that_chooses_the_best_model(folder):
    """With other data than the Trainer would evaluate, at other steps, and on one rank alone a forward pass."""

    def does(user, control):
        if distributed.get_rank() == 0:
            with torch.no_grad():
                user.trainer.model.eval()(torch.ones(8, 16), torch.zeros(8, dtype=torch.long))
            user.trainer.model.evaluated.pop()
            user.trainer.model.train()
        control.should_evaluate = control.should_save = True

    made = evaluated(
        folder, When("on_step_end", does), eval_strategy="steps", eval_steps=100, save_strategy="steps",
        save_steps=100, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    assert equal_on_all_ranks(torch.tensor([made.state.best_metric]))
    assert made.state.best_global_step in AT


def interrupted(folder, build=local, method="on_step_end", error=KeyboardInterrupt, ours_first=True, **more):
    """A Trainer whose training has ended by an exception, caught."""

    def fails(user, control):
        raise error

    callbacks = [build(), When(method, fails, (6,))]
    made = trainer(folder, callbacks if ours_first else callbacks[::-1], **more)
    try:
        made.train()
    except error:
        made.remove_callback(When)
        return made
    raise AssertionError("not interrupted")


def trains_as_stock(made):
    made.pop_callback(TransformersCallback)
    made.train()
    assert equal_on_all_ranks(parameters(made.model))
    assert averages(made.model_wrapped)
    assert type(made).evaluation_loop is getattr(made.evaluation_loop, "__func__", None)


@case
def interrupted_and_trained_without_it(folder):
    trains_as_stock(interrupted(folder))


@case
def interrupted_before_our_callback_and_trained_without_it(folder):
    trains_as_stock(interrupted(folder, ours_first=False))


@case
def interrupted_between_two_backward_passes_and_trained_without_it(folder):
    trains_as_stock(interrupted(folder, method="on_substep_end", gradient_accumulation_steps=2))


@case
def interrupted_by_an_error_in_an_evaluation_and_trained_without_it(folder):
    trains_as_stock(
        interrupted(folder, method="on_evaluate", error=ValueError, eval_strategy="steps", eval_steps=6),
    )


@case
def interrupted_with_a_compressor_and_trained_without_it(folder):
    trains_as_stock(interrupted(folder, lambda: TransformersCallback(hvd_compress.Quantized, bits=2)))


@case
def interrupted_and_evaluated(folder):
    made = interrupted(folder)
    made.evaluate()
    assert all(map(equal_on_all_ranks, made.model.evaluated))


@case
def interrupted_and_resumed(folder):
    """By the same Trainer and callback, from a checkpoint between two exchanges."""
    made = interrupted(folder, save_strategy="steps", save_steps=3)
    distributed.barrier()
    made.train(resume_from_checkpoint=True)
    resumed = flat(made.model)
    assert equal_on_all_ranks(resumed)
    whole = trainer(folder / "whole", [local()], save_strategy="steps", save_steps=3)
    whole.train()
    assert torch.equal(resumed, flat(whole.model))


@case
def interrupted_and_trained_by_a_loop(folder):
    """Of the user's own, of the wrapped model, after the callback is gone."""
    made = interrupted(folder)
    made.pop_callback(TransformersCallback)
    model, optimizer = made.model_wrapped.train(), made.optimizer.optimizer
    for number in range(3):
        torch.manual_seed(10 * number + distributed.get_rank())
        model(torch.randn(8, 16), torch.randint(4, (8,)))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_all_ranks(parameters(made.model))


def trains_with_another_optimizer(made, model, optimizer):
    for number in range(4):
        torch.manual_seed(10 * number + distributed.get_rank())
        made.backward(model(torch.randn(8, 16)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_all_ranks(parameters(model)) and averages(model)


def ended_and_trained_by_others(method, first=lambda p: torch.optim.SGD(p, lr=0.01)):
    """With the loop alive: a new optimizer, then the old one again."""
    made = accelerator()
    ((model, optimizer, loop),) = loops(made, 1, {0: method}, first)
    train(made, [(model, optimizer, loop)], 6)
    loop.end()
    loop.end()
    trains_with_another_optimizer(made, model, made.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2)))
    trains_with_another_optimizer(made, model, optimizer)
    assert loop.compression.state_dict()


@case
def a_new_optimizer_after_local_steps(folder):
    ended_and_trained_by_others((recipes.diloco, {"period": 4}), lambda p: torch.optim.AdamW(p, lr=1e-2))


@case
def a_new_optimizer_after_a_quantizer(folder):
    ended_and_trained_by_others((hvd_compress.Quantized, {"bits": 2}))


@case
def a_new_optimizer_after_demo(folder):
    ended_and_trained_by_others((hvd_compress.DeMo, {}))


@case
def another_trainer_after_a_compressor(folder):
    """Without the callback, the first one alive."""
    first = trainer(folder, [TransformersCallback(hvd_compress.Quantized, bits=2)])
    first.train()
    other = trainer(folder, [], first.model)
    other.train()
    assert equal_on_all_ranks(parameters(first.model))


@case
def compiled_by_transformers(folder):
    """A compiled model around DDP has no truth value."""
    for build, options in ((recipes.low_bit, {"period": 4}), (hvd_compress.Quantized, {"bits": 4})):
        made = []
        for compiled in (False, True):
            callback = TransformersCallback(build, **options)
            made.append(trainer(folder, [callback], torch_compile=compiled, torch_compile_backend="eager"))
            made[-1].train()
        torch.testing.assert_close(*(parameters(one.model) for one in made), rtol=1e-3, atol=1e-4)
        assert equal_on_all_ranks(parameters(made[1].model))


@case
def two_callbacks_at_once(folder):
    made = trainer(folder, [local(), local()])
    try:
        made.train()
    except ValueError as error:
        assert "two TransformersCallbacks" in str(error)
    else:
        raise AssertionError("not refused")


def accelerator():
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True)


def loops(made, count, build=None, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)):
    """Of models of one shape."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        model, stepping = made.prepare(model, optimizer(model.parameters()))
        method = (build or {}).get(number, (recipes.low_bit, {"period": 4}))
        found.append((model, stepping, AccelerateLoop(method[0], made, model, stepping, **method[1])))
    return found


def train(made, parts, steps, first=0):
    for step in range(first, first + steps):
        for number, (model, optimizer, loop) in enumerate(parts):
            torch.manual_seed(100 * step + 10 * number + distributed.get_rank())
            x, labels = torch.randn(8, 16), torch.randint(4, (8,))
            made.backward(nn.functional.cross_entropy(model(x), labels))
            optimizer.step()
            loop.step()
            optimizer.zero_grad()


def resumes(folder, count, build=None):
    """All models, into new objects, bit for bit."""
    made = accelerator()
    parts = loops(made, count, build)
    train(made, parts, 6)
    made.save_state(str(folder))
    distributed.barrier()
    train(made, parts, 5, 6)
    other = accelerator()
    others = loops(other, count, build)
    other.load_state(str(folder))
    train(other, others, 5, 6)
    for (model, _, loop), (resumed, _, again) in zip(parts, others, strict=True):
        assert torch.equal(flat(model), flat(resumed))
        loop.end()
        again.end()
        assert equal_on_all_ranks(flat(model))


@case
def two_loops_resumed(folder):
    resumes(folder, 2)


@case
def three_loops_resumed(folder):
    resumes(folder, 3)


@case
def a_compressor_and_local_steps_resumed(folder):
    resumes(folder, 2, {0: (hvd_compress.Quantized, {"bits": 2})})


@case
def a_loop_ended_before_the_other_is_saved(folder):
    made = accelerator()
    parts = loops(made, 2)
    train(made, parts, 3)
    parts[0][2].end()
    train(made, parts[1:], 3)
    made.save_state(str(folder))
    distributed.barrier()
    assert sorted(p.name for p in folder.glob("hvd_compress*")) == [f"hvd_compress-{n}-of-2.pt" for n in range(2)]
    before = [flat(model) for model, *_ in parts]
    train(made, parts[1:], 3)
    made.load_state(str(folder))
    assert all(map(torch.equal, before, [flat(model) for model, *_ in parts]))


@case
def a_loop_built_again_for_one_model(folder):
    """As a notebook's cell that is run again: the first ends, and has no file."""
    made = accelerator()
    ((model, optimizer, first),) = loops(made, 1)
    train(made, [(model, optimizer, first)], 4)
    again = AccelerateLoop(recipes.low_bit, made, model, optimizer, period=4)
    train(made, [(model, optimizer, again)], 6)
    made.save_state(str(folder))
    distributed.barrier()
    assert len(list(folder.glob("hvd_compress*"))) == 2
    made.load_state(str(folder))
    again.end()
    assert equal_on_all_ranks(flat(model)) and averages(model)
    assert not made._custom_objects and not made._save_model_state_pre_hook and not made._load_model_state_pre_hook


@case
def a_loop_dropped_without_an_end(folder):
    """It goes on, whenever each rank's garbage collector runs, and another optimizer is told how to end it."""
    made = accelerator()
    parts = loops(made, 1)
    train(made, parts, 4)
    model = parts[0][0]
    made._custom_objects.clear()
    made._save_model_state_pre_hook.clear()
    made._load_model_state_pre_hook.clear()
    del parts
    gc.collect()
    torch.manual_seed(distributed.get_rank())
    model(torch.randn(8, 16)).sum().backward()
    assert not equal_on_all_ranks(torch.cat([p.grad.flatten() for p in model.parameters()]))
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        raise AssertionError("the other optimizer has stepped")
    except ValueError as error:
        assert "call local.end(model) on all ranks" in str(error)


folder, *names = sys.argv[1:]
distributed.init_process_group("gloo")
destroy, distributed.destroy_process_group = distributed.destroy_process_group, lambda *_, **__: None
rank = distributed.get_rank()
for name in names or CASES:
    try:
        CASES[name](Path(folder, name))
        print(f"rank {rank} ok: {name}\n", end="", flush=True)
    except Exception:
        print(f"rank {rank} failed: {name}\n{traceback.format_exc()}\n", end="", flush=True)
    gc.collect()
    distributed.barrier()
destroy()
