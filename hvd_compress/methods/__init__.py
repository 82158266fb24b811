"""One module a published method; each reads like its paper's algorithm."""
