"""Sweeps: settings x variants x seeds, run in packs, stored cell by cell.

Begin with `plan.py` (a file and its cells) and `runner.py`, which decides which cells run and has
them run. `packs.py` decides which run side by side, `shard.py` which part a command runs,
`folder.py` knows the files on disk. `local.py`, `workers.py` and `cluster.py` run packs in this
process, in several, or on Ray; `stop.py` holds the budget and `progress.py` the display.
"""
