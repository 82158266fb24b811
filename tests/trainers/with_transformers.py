"""transformers' Trainer."""

import torch
from problem import ACCUMULATION, BATCH, SAVED, STEPS, data, net, optimizers, schedule
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from hvd_compress.trainers import TransformersCallback


def collate(pieces):
    return {"x": torch.stack([x for x, _ in pieces]), "labels": torch.stack([label for _, label in pieces])}


def train(folder, build, options, *, resume=False, evaluate=False, average=True):
    """The model, the callback, the steps, and what was logged. It saves every ``SAVED`` steps. ``evaluate``: as often,
    and the second evaluation stops the training."""
    model, extra = net(), {}
    optimizer = optimizers(model)
    if evaluate:
        extra = {"eval_strategy": "steps", "eval_steps": SAVED, "load_best_model_at_end": True}
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.0, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="steps", save_steps=SAVED,
        logging_steps=2, ddp_find_unused_parameters=False, metric_for_best_model="eval_loss", **extra,
    )  # fmt: skip
    callback = TransformersCallback(build, average=average, **options)
    stop = [EarlyStoppingCallback(early_stopping_threshold=1e9)] if evaluate else []
    trainer = Trainer(
        model, arguments, train_dataset=data(), eval_dataset=data(32), data_collator=collate,
        optimizers=(optimizer, schedule(optimizer)), callbacks=[*stop, callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    logged = {key: value for line in trainer.state.log_history for key, value in line.items()}
    return model, callback, trainer.state.global_step, logged
