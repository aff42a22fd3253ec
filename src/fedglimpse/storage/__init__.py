"""Files that must survive a crash, a power loss and a bad disk.

`store.py` writes, syncs and verifies files, `checkpoint.py` replaces checkpoints in one step,
`lock.py` keeps a folder to one process. Begin with `store.py`. May import `errors` and `version`.
"""
