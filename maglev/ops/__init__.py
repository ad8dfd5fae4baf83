"""Tensors in, tensors out. `reference.py` defines every op; kernel choice lives in this package and nowhere else."""
