"""Trains by train.py several times in one launch, with --host fsdp: run.sh --ddp NP fsdp_trainings.py ARGUMENTS...

The arguments of a training are one word.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "experiments"))

import train
from experiment import hosts

host = hosts.start("fsdp")
close, host.close = host.close, lambda status: status
close(max([train.train(train.parse(arguments.split()), host, train.Run) for arguments in sys.argv[1:]]))
