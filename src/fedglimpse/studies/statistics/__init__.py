"""Statistics of a few seeds: one run in few numbers, differences between methods, costs, fairness.

Pure functions of records and numbers; they read no files and may import `runs.summary` and `rng`.
Begin with `difference.py`, which decides what may be called significant, then `condense.py`.
"""
