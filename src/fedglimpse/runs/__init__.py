"""One run from start to end: build a world, run its rounds, keep its records, resume it.

Begin with `rounds.py` (the loop), then `experiment.py`. May import every room but `studies`,
`flower`, `env` and `cli`.
"""
