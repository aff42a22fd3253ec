"""One run from start to end: build a world, run its rounds, keep its records, resume it.

Begin with `experiment.py`: `Pack.run_rounds` is the loop. `rounds.py` runs a single round. May
import every room but `studies`, `flower`, `env` and `cli`.
"""
