#!/usr/bin/env python3
"""Train nanoGPT's own train.py, changed as docs/local_steps.md tells its user to: what do local steps lose?

    nanogpt.py                  the table in docs/results.md, of stored runs
    nanogpt.py --train NANO     trains what is not stored, one run after the other, in place of the table

NANO is a clone of karpathy/nanoGPT, commit 3adf61e, after `python data/shakespeare_char/prepare.py`; it is only read.
The diff and the Muon block are taken from the page as they stand. Besides them the script gets what a CPU needs, and
another seed. Options are those of nanoGPT's README for a CPU: 2,000 steps of 12 windows of 64 characters, which the
ranks divide; it evaluates at the start and at the end only. Dense training is the same script under plain `python`,
with all 12 windows. The loss is of all of val.bin, in nats, of the checkpoint that the script saves at the end.
"""

import argparse
import hashlib
import importlib.util
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import metrics
from experiment.files import script_parser
from experiment.result_file import Result, read_runs, write_run

from hvd_compress.cli.processes import exit_on_signals, run_group

ROOT = Path(__file__).resolve().parents[2]
PAGE, FILE = ROOT / "docs" / "local_steps.md", ROOT / "docs" / "results" / "nanogpt" / "runs.jsonl"
RANKS, WINDOWS, STEPS = 4, 12, 2000
#: Their titles in the table.
VARIANTS = {
    "dense": "nanoGPT, dense",
    "low_bit": "nanoGPT, `low_bit`",
    "averaged": "nanoGPT, the same, `on_averaged_gradients=adamw`",
}
RATES = ("1e-3", "3e-3", "6e-3", "1.2e-2")
OPTIONS = [
    "config/train_shakespeare_char.py",
    *("--device=cpu", "--backend=gloo", "--compile=False", "--eval_iters=20", "--log_interval=200"),
    *("--block_size=64", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0", "--always_save_checkpoint=True"),
]
#: On a CPU, nanoGPT's README changes options only, with one process; several need these lines.
CPU = {
    "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": "    device = 'cpu'\n",
    "    model = DDP(model, device_ids=[ddp_local_rank])\n": "    model = DDP(model)\n",
}
SEED = "torch.manual_seed({} + seed_offset)\n"


def replaced(source: str, old: str, new: str) -> str:
    """The source with other lines. ``ValueError`` if the old ones do not stand there exactly once."""
    source, count = re.subn(f"^{re.escape(old)}", lambda _: new, source, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"train.py has these lines {count} times, not once:\n{old}")
    return source


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(text: str, language: str) -> str:
    """The only block of code in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


def parts(diff: str) -> list[tuple[str, str]]:
    """Old and new lines of each part of a diff, which " ..." divides; where no lines are old, new ones come first."""
    found = []
    for part in re.split(r"^ \.\.\.\n", diff, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        found.append((old, new))
    return found


def changed(source: str, page: str, variant: str, seed: int) -> str:
    """nanoGPT's script as a reader of the page has it, with Muon, and made ready for CPUs."""
    about = section(page, "In a script with DDP: nanoGPT")
    for old, new in parts(block(about, "diff")):
        source = replaced(source, old, new) if old else new + source
    (optimizer,) = re.findall(r"^optimizer = model\.configure_optimizers\(.*\)\n", source, re.MULTILINE)
    source = replaced(source, optimizer, block(about, "python"))
    if variant == "averaged":
        call = block(section(page, "From 16 ranks on"), "python").removesuffix("\n")
        (line,) = re.findall(r"^    local = hvd_compress\.recipes\.low_bit\(.*\n", source, re.MULTILINE)
        source = replaced(source, line, f"    {call.replace('(model,', '(model.module,')}\n")
    for old, new in CPU.items():
        source = replaced(source, old, new)
    return replaced(source, SEED.format(1337), SEED.format(1337 + 100 * seed))


@torch.no_grad()
def loss(nano: Path, checkpoint: Path) -> float:
    """The loss of all of val.bin, in windows one after the other."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", nano / "model.py")
    spec.loader.exec_module(code := importlib.util.module_from_spec(spec))  # type: ignore[arg-type, union-attr]
    saved = torch.load(checkpoint, weights_only=True)
    model = code.GPT(code.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    text = torch.from_numpy(np.fromfile(nano / "data" / "shakespeare_char" / "val.bin", np.uint16).astype(np.int64))
    length = saved["model_args"]["block_size"] + 1
    windows = text[: len(text) // length * length].view(-1, length)
    sums = [model(w[:, :-1].contiguous(), w[:, 1:].contiguous())[1].item() * len(w) for w in windows.split(64)]
    return sum(sums) / len(windows)


def train(nano: Path, variant: str, rate: str, seed: int, steps: int, timeout: float) -> Result:
    """Trains; the content of its line in the file. ``Failed`` if it does not come to its end."""
    ranks = 1 if variant == "dense" else RANKS
    config = {"compression": "none" if variant == "dense" else "low_bit", **metrics.environment()}
    source = (nano / "train.py").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(changed(source, PAGE.read_text(), variant, seed))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        values: dict[str, Any] = {"batch_size": WINDOWS // ranks, "gradient_accumulation_steps": ranks}
        values |= {"learning_rate": rate, "min_lr": float(rate) / 10, "out_dir": folder}
        values |= dict.fromkeys(("max_iters", "lr_decay_iters", "eval_interval"), steps)
        given = [*OPTIONS, *(f"--{key}={value}" for key, value in values.items())]
        command = ["env", "-C", str(nano), sys.executable, *launcher, str(folder / "train.py"), *given]
        settings = {"PYTHONPATH": f"{ROOT}:{nano}", "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        run_group(command, timeout, folder / "log", settings, f"{variant} at {rate}, seed {seed}")
        seconds = time.monotonic() - start
        ratios = re.findall(r"rank 0: (\d+) times fewer bytes", (folder / "log").read_text())
        return {
            "variant": variant,
            "ranks": ranks,
            "learning_rate": rate,
            "seed": seed,
            "steps": steps,
            "val_loss": loss(nano, folder / "ckpt.pt"),
            "wire_ratio": 1 if ranks == 1 else int(ratios[0]),
            "seconds": seconds,
            "script": hashlib.sha256(source.encode()).hexdigest()[:16],
            "config": config,
        }


def rows(runs: dict[str, Result]) -> list[dict[str, str]]:
    """Rows of the table, one a variant: by learning rate, the mean over the seeds, and by how much it is over dense
    training with these seeds."""
    found: dict[str, dict[str, dict[int, float]]] = {variant: {} for variant in VARIANTS}
    for run in sorted(runs.values(), key=lambda run: float(run["learning_rate"])):
        found[run["variant"]].setdefault(run["learning_rate"], {})[run["seed"]] = run["val_loss"]
    rates = sorted({rate for losses in found.values() for rate in losses}, key=float)

    def cell(variant: str, rate: str) -> str:
        seeds, dense = found[variant].get(rate, {}), found["dense"].get(rate, {})
        if not seeds:
            return ""
        about = [f"{len(seeds)} seeds"] * (len(seeds) > 1)
        if variant != "dense" and seeds.keys() <= dense.keys():
            about.append(f"{sum(seeds.values()) / sum(dense[seed] for seed in seeds) - 1:+.1%}".replace("%", " %"))
        return f"{sum(seeds.values()) / len(seeds):.3f}" + (f" ({', '.join(about)})" if about else "")

    return [
        {"learning rate": title, **{rate: cell(variant, rate) for rate in rates}} for variant, title in VARIANTS.items()
    ]


def main() -> None:
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--train", type=Path, metavar="NANO", help="train what is not stored, in place of the table")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(default: all)")
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help=f"(default: {' '.join(RATES)})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="(default: 0)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=FILE, help="stored runs (default: those of docs/)")
    parser.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def stored() -> dict[str, Result]:
        return read_runs(args.results) if args.results.exists() else {}

    if not args.train:
        import table  # here, since it needs more than torch and numpy

        return print(table.markdown(rows(stored())))
    for seed in args.seeds:
        for rate in args.rates:
            for variant in args.variants:
                path = args.results / f"{variant}-{rate}-{seed}"
                if path.name not in stored():
                    result = train(args.train.resolve(), variant, rate, seed, args.steps, args.timeout)
                    write_run(path, result)
                    print(f"{path.name}: {result['val_loss']:.4f}, {result['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    with exit_on_signals():
        main()
