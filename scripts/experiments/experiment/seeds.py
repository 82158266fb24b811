"""Random generators of a run."""

import numpy as np
import torch


def generator(*key: int) -> torch.Generator:
    """SeedSequence mixes the numbers, so that neighbouring keys are unrelated."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
