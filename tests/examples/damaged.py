"""Trains elastic_local_steps, and resumes it from copies of its checkpoints, each damaged in one way, in this rank:
damaged.py FOLDER SCRIPT. Started by test_examples.py on both ranks.

Rank 0 prints, for each kind of damage, what a run printed that begins with it.
"""

import io
import os
import runpy
import shutil
import sys
from pathlib import Path

from torch import distributed

folder, script = Path(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo")
distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
if distributed.get_rank():
    sys.stdout = io.StringIO()
#: A checkpoint each.
STEPS = (2, 4, 6)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def damage(name: str, file: str, how: object, *steps: int) -> tuple[str, list[tuple[str, object]]]:
    return name, [(f"step-{step:09}/{file}", how) for step in steps]


DAMAGES = dict(
    [
        damage("nothing", "", lambda path: None),
        damage("weights_cut_off", "__0_0.distcp", truncate, 6),
        damage("a_flipped_byte_of_the_other_rank", "__1_0.distcp", flip, 6),
        damage("weights_missing", "__1_0.distcp", Path.unlink, 6),
        damage("index_cut_off", ".metadata", truncate, 6),
        damage("moments_of_a_rank_missing", "adamw-1.pt", Path.unlink, 6),
        damage("moments_empty", "adamw-0.pt", lambda path: path.write_bytes(b""), 6),
        damage("moments_of_two_checkpoints_cut_off", "adamw-1.pt", truncate, 6, 4),
        damage("every_checkpoint", "__0_0.distcp", truncate, *STEPS),
    ]
)


def run(checkpoints: Path, steps: int) -> None:
    sys.argv = [script, "--steps", str(steps), "--save-every", "2", "--checkpoints", str(checkpoints)]
    runpy.run_path(script, run_name="__main__")


run(folder / "whole", STEPS[-1])
for name, files in DAMAGES.items():
    distributed.barrier()
    if not distributed.get_rank():
        shutil.copytree(folder / "whole", folder / name)
        for file, how in files:
            how(folder / name / file)
    distributed.barrier()
    try:
        run(folder / name, STEPS[-1] + 1)
    except RuntimeError as error:
        print(f"{name} raised {error}")
    print(f"ended {name}", flush=True)
