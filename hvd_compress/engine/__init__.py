"""Buckets of parameters and their exchanges between ranks. Knows no host, no method and no step."""
