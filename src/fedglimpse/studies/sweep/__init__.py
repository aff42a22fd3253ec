"""Sweeps: settings x variants x seeds, run in packs, stored cell by cell.

Begin with `plan.py` (a file and its cells) and `runner.py`, which decides which cells run and which
run side by side, and has them run. `folder.py` knows the files on disk, `local.py` and `cluster.py`
run packs here or on Ray, `stop.py` holds the budget and `progress.py` the display.
"""
