"""Hugging Face Trainer: local steps of Muon and AdamW by a callback, which serves any model.

torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 201 --checkpoints /tmp/trainer
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hvd_compress


def collate(pieces):
    ids = torch.stack([piece[0] for piece in pieces])
    return {"input_ids": ids, "labels": ids}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=201)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(Path(torch.nn.functional.__file__).read_bytes()), dtype=torch.uint8).long()
    pieces = text[: len(text) // 64 * 64].view(-1, 64)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    matrices, others = hvd_compress.hidden_matrices(model)
    muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others.values(), lr=3e-3)
    optimizer = hvd_compress.trainers.CombinedOptimizer([muon, adamw])
    callback = hvd_compress.trainers.TransformersCallback(hvd_compress.recipes.low_bit, period=3)

    arguments = TrainingArguments(
        str(options.checkpoints), max_steps=options.steps, per_device_train_batch_size=8, lr_scheduler_type="constant",
        report_to="none", disable_tqdm=True, save_steps=10**9, logging_steps=50, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=TensorDataset(pieces), data_collator=collate, optimizers=(optimizer, None),
        callbacks=[callback],
    )  # fmt: skip
    last = get_last_checkpoint(str(options.checkpoints)) if options.checkpoints.exists() else None
    trainer.train(resume_from_checkpoint=last)

    with torch.no_grad():
        loss = model(pieces[:16], labels=pieces[:16]).loss
    ratio = callback.compression.stats()["total"]["wire_ratio"]
    steps = trainer.state.global_step
    print(f"rank {arguments.process_index}: {steps} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
