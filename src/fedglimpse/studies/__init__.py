"""Many runs: sweeps, what was stored of them, their statistics, and the report.

Begin with `sweep/plan.py`, then `results/load.py`. May import `runs`, `config` and below.
"""
