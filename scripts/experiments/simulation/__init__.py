"""Data-parallel trainings of small GPTs with many ranks, simulated: the weights of all ranks of several runs are one
tensor (runs, ranks, entries), and nothing is sent."""
