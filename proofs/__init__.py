"""Theorems about the functions in `spec`, for every number of ranks, samples, windows and budgets.

Each module states one or two theorems and proves their obligations with `model_check.prover`, on
the very function objects that the loader runs. `proofs.catalogue` lists them, and what is not
proved; `odb verify --proofs` checks them all.
"""
