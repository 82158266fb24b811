"""Parts of the training experiment; `scripts/experiments/train.py` puts them together."""
