"""A loop of Accelerate, whose evaluation and early end are the user's."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from problem import ACCUMULATION, BATCH, SAVED, STEPS, data, net, optimizers, schedule
from torch.utils.data import DataLoader

from hvd_compress.trainers import AccelerateLoop


def train(folder, build, options, *, resume=False, evaluate=False, average=True):
    """See with_transformers.py."""
    AcceleratorState._reset_state()  # of the trainings before, with other arguments
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=False)
    model = net()
    optimizer = optimizers(model)
    prepared = accelerator.prepare(model, optimizer, schedule(optimizer), DataLoader(data(), BATCH))
    wrapped, optimizer, scheduler, batches = prepared
    loop, step = AccelerateLoop(build, accelerator, wrapped, optimizer, **options), 0
    if resume:
        accelerator.load_state(str(folder / f"step-{SAVED}"))
        step = SAVED
    while step < STEPS:
        for x, labels in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(x, labels)["loss"])
                optimizer.step()
                loop.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                    step += 1
                optimizer.zero_grad()
        if evaluate:
            if average:
                loop.finish()
            model.eval()(*data(32)[:BATCH])
            model.train()
        accelerator.save_state(str(folder / f"step-{step}"))
        if evaluate and step == 2 * SAVED:
            break
    loop.end()
    return model, loop, step, loop.metrics()
