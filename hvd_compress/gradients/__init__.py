"""The gradients' clock: one training step, from the first gradient to the optimizer that applies the averages."""
