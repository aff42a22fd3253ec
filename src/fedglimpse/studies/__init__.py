"""Many runs: sweeps over settings, methods and seeds, their stored results, statistics, reports.

`sweep/` runs them, `results/` reads what was stored, `statistics/` says what is significant,
`report/` shows it; `compare.py` is the table of `fedglimpse compare`, `pool.py` has the worker
processes. May import `runs`, `config`, `data` and what lies below these. Begin with
`sweep/plan.py`, then `results/load.py`.
"""
