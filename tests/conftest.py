import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# Ranks are threads or processes on few cores: one thread each.
torch.set_num_threads(1)
