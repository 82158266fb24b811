"""The published methods, one module each, and their parts."""
