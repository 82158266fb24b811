"""Local steps: several optimizer steps of each rank between two exchanges of weights."""
