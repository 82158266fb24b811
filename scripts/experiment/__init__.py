"""Parts of the training experiment; `scripts/train.py` puts them together."""
