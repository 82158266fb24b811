"""``python -m hvd_compress``: the command line."""

from .cli import main

main()
