"""Files that must survive a crash.

`lock.py` keeps a folder to one process, `checkpoint.py` replaces checkpoints atomically. Begin with
`checkpoint.py`. May import `errors` and `version`.
"""
