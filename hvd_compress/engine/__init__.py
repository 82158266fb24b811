"""One training step, independent of who calls (``hosts``) and of what is exchanged (``methods``)."""
