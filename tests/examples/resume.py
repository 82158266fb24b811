"""Runs an example three times in this rank: resume.py SCRIPT FOLDER STEPS [ARGUMENT...]

All STEPS at once; half of them; the other half, from the checkpoint. Started by test_examples.py on every rank."""

import os
import runpy
import sys

from torch import distributed

script, folder, steps, *arguments = sys.argv[1:]
sys.path[0] = os.path.dirname(script)  # as if it had been started
if "TORCHELASTIC_RUN_ID" in os.environ:
    # One process group for the three runs: a second one would find the first one's addresses in torchrun's store.
    distributed.init_process_group("gloo")
    distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
for count, checkpoints in ((int(steps), "whole"), (int(steps) // 2, "resumed"), (int(steps), "resumed")):
    sys.argv = [script, "--steps", str(count), "--checkpoints", f"{folder}/{checkpoints}", *arguments]
    runpy.run_path(script, run_name="__main__")
