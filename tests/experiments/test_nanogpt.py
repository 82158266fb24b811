"""scripts/experiments/nanogpt.py: the lines of docs/local_steps.md fit into a script with nanoGPT's, and train."""

import json
import math
import re

import nanogpt
import numpy as np
import pytest
import torch

#: What the page and the script look for, in a script that trains a smaller model; nanoGPT's own is not in this project.
TRAIN = """\
import os
import sys

import numpy as np
import torch
from model import GPT, GPTConfig
from torch.distributed import destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

options = dict(option[2:].split("=") for option in sys.argv[2:])
max_iters, eval_interval, block_size = (int(options[key]) for key in ("max_iters", "eval_interval", "block_size"))
learning_rate, weight_decay, beta1, beta2 = float(options["learning_rate"]), 0.1, 0.9, 0.99
ddp, seed_offset, iter_num = "RANK" in os.environ, 0, 0
if ddp:
    torch.distributed.init_process_group(options["backend"])
    seed_offset = ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    device = f'cuda:{ddp_local_rank}'
    torch.cuda.set_device(device)
master_process = seed_offset == 0
torch.manual_seed(1337 + seed_offset)
data = torch.from_numpy(np.fromfile("data/shakespeare_char/train.bin", np.uint16).astype(np.int64))
model_args = {"vocab_size": 65, "block_size": block_size}
model = GPT(GPTConfig(**model_args))
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), "cpu")
# wrap model into DDP container
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model
while True:
    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0 and master_process:
        torch.save({"model": raw_model.state_dict(), "model_args": model_args}, f"{options['out_dir']}/ckpt.pt")
    starts = torch.randint(len(data) - block_size, (int(options["batch_size"]),))
    windows = torch.stack([data[start : start + block_size + 1] for start in starts])
    scaler.scale(model(windows[:, :-1], windows[:, 1:])[1]).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
"""
MODEL = """\
from dataclasses import dataclass

import torch


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab_size, 32)
        self.hidden = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, config.vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(torch.relu(self.hidden(self.embedding(tokens))))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
PAGE = nanogpt.PAGE.read_text()
DIFF = nanogpt.block(nanogpt.section(PAGE, "In a script with DDP: nanoGPT"), "diff")
#: What has to stand in a script.
OLD = [old for old, _ in nanogpt.parts(DIFF) if old] + [*nanogpt.CPU, nanogpt.SEED.format(1337)]


@pytest.fixture
def nano(tmp_path):
    data = tmp_path / "nano" / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    (tmp_path / "nano" / "train.py").write_text(TRAIN)
    (tmp_path / "nano" / "model.py").write_text(MODEL)
    for name, count in (("train", 3000), ("val", 700)):
        np.arange(count, dtype=np.uint16).__mod__(65).tofile(data / f"{name}.bin")
    return tmp_path / "nano"


@pytest.fixture
def called(nano, tmp_path, monkeypatch, capsys):
    def call(*options):
        monkeypatch.setattr("sys.argv", ["nanogpt.py", "--results", str(tmp_path / "runs.jsonl"), *options])
        monkeypatch.setattr(nanogpt, "RANKS", 2)
        threads = torch.get_num_threads()
        try:
            nanogpt.main()
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr()

    return call


@pytest.mark.parametrize("variant", ["low_bit", pytest.param("averaged", marks=pytest.mark.slow)])
def test_variants_are_trained_once_and_shown(variant, called, nano, tmp_path):
    train = ("--train", str(nano), "--rates", "1e-2", "--steps", "30", "--variants", "dense", variant)
    called(*train)
    dense, local = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert (dense["variant"], dense["ranks"], local["variant"], local["ranks"]) == ("dense", 1, variant, 2)
    assert dense["val_loss"] != local["val_loss"] and max(dense["val_loss"], local["val_loss"]) < math.log(65) - 1
    assert dense["wire_ratio"] == 1 and local["wire_ratio"] > 5 and dense["config"]["git_commit"]
    assert called(*train).err == "" and called().out.count(f"{local['val_loss']:.3f} (") == 1
    assert (nano / "train.py").read_text() == TRAIN


def test_the_page_is_what_is_trained():
    other = PAGE.replace("low_bit(model.module, optimizer)", "low_bit(model.module, optimizer, 7)")
    other = other.replace("betas=(beta1, beta2)", "betas=(0.5, beta2)")
    found = nanogpt.changed(TRAIN, other, "low_bit", 0)
    assert "low_bit(model.module, optimizer, 7)" in found and "betas=(0.5, beta2)" in found
    averaged = nanogpt.changed(TRAIN, PAGE, "averaged", 2)
    assert "low_bit(model.module, muon, on_averaged_gradients=adamw)" in averaged and "1537 + seed" in averaged
    added = [line[1:] for line in DIFF.splitlines() if line[:1] == "+"]
    assert len(added) > 6 and set(added) <= set(nanogpt.changed(TRAIN, PAGE, "dense", 0).splitlines())


@pytest.mark.parametrize("old", OLD)
def test_a_script_without_the_lines_or_with_them_twice_is_refused(old):
    for count in (0, 2):
        with pytest.raises(ValueError, match=rf"{count} times, not once(.*\n)*{re.escape(old.splitlines()[-1])}"):
            nanogpt.changed(TRAIN.replace(old, count * old), PAGE, "low_bit", 0)


def test_a_diff_with_removed_lines_is_applied():
    assert nanogpt.parts("+a\n ...\n b\n-c\n+d\n") == [("", "a\n"), ("b\nc\n", "b\nd\n")]


def test_the_table_compares_the_same_seeds():
    def run(variant, seed, loss, rate="6e-3"):
        return {"variant": variant, "seed": seed, "val_loss": loss, "learning_rate": rate}

    runs = [run("dense", 0, 2.0), run("dense", 1, 3.0), run("low_bit", 0, 2.2), run("averaged", 0, 1.0, "1.2e-2")]
    runs += [run("averaged", 0, 2.5), run("averaged", 2, 2.5)]
    dense, low_bit, averaged = (list(row.items())[1:] for row in nanogpt.rows(dict(enumerate(runs))))
    assert dense == [("6e-3", "2.500 (2 seeds)"), ("1.2e-2", "")]
    assert low_bit == [("6e-3", "2.200 (+10.0 %)"), ("1.2e-2", "")]
    assert averaged == [("6e-3", "2.500 (2 seeds)"), ("1.2e-2", "1.000")]
