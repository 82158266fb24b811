"""Hugging Face Trainer: a callback that compresses the gradients of any model that it trains.

torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 200 --checkpoints /tmp/trainer
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hvd_compress


class Compression(TrainerCallback):
    """``build``: makes a compressor from named parameters. Every rank's state lies in the Trainer's checkpoints."""

    def __init__(self, build=hvd_compress.IWP, **options):
        self.build, self.options = build, options

    def on_train_begin(self, args, state, control, **others):
        model = self.trainer.model_wrapped  # DistributedDataParallel
        self.compression = self.build(model.module.named_parameters(), **self.options)
        model.register_comm_hook(self.compression, hvd_compress.ddp_hook)
        if state.global_step:
            self.compression.load_state_dict(torch.load(self.file(args, state), weights_only=True))

    def on_save(self, args, state, control, **others):
        torch.save(self.compression.state_dict(), self.file(args, state))

    def on_log(self, args, state, control, logs=None, **others):
        logs.update(self.compression.metrics())

    def file(self, args, state):
        return Path(args.output_dir, f"checkpoint-{state.global_step}", f"compression-{args.process_index}.pt")


def collate(pieces):
    ids = torch.stack([piece[0] for piece in pieces])
    return {"input_ids": ids, "labels": ids}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(Path(torch.nn.functional.__file__).read_bytes()), dtype=torch.uint8).long()
    pieces = text[: len(text) // 64 * 64].view(-1, 64)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        str(options.checkpoints), max_steps=options.steps, per_device_train_batch_size=8, learning_rate=2e-3,
        lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, report_to="none", disable_tqdm=True,
        save_steps=10**9, logging_steps=50, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    callback = Compression(hvd_compress.DeMo)  # signs of momentum, in place of AdamW: optim="sgd", no clipping
    data = TensorDataset(pieces)
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[callback])
    callback.trainer = trainer
    last = get_last_checkpoint(str(options.checkpoints)) if options.checkpoints.exists() else None
    trainer.train(resume_from_checkpoint=last)

    with torch.no_grad():
        loss = model(pieces[:16], labels=pieces[:16]).loss
    ratio = callback.compression.stats()["total"]["wire_ratio"]
    steps = trainer.state.global_step
    print(f"rank {arguments.process_index}: {steps} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
