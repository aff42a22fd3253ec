"""The command `fedglimpse`: one file for each subcommand, put together in `main.py`.

`entry.py` runs first, before torch is imported; `info.py` holds the small commands `methods`,
`data` and `doctor`; `pretrain.py` is `fedglimpse teach`. May import every room; no room imports
this one. Begin with `main.py`, then `run.py`.
"""
