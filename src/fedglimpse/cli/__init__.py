"""The command `fedglimpse`: its subcommands, put together in `main.py`.

`run.py` holds the commands that train (`run`, `compare`, `teach`), `sweep.py` runs many of them,
`results.py` reads results (`report`, `theory`), `info.py` says what there is (`methods`, `schema`,
`data`, `doctor`), `bench.py` measures the machine, `flower.py` writes a Flower app to start from.
These files hold options and checks, and import no torch until their words are known to be right;
`training.py` and `timing.py` do the work of `run.py` and `bench.py`. `entry.py` runs first. May
import every room; no room imports this one. Begin with `main.py`, then `run.py`.
"""
