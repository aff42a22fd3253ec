"""Stored results: every cell of a study, read from run folders or from one committed file.

May import `config`, `data`, `runs`, `types` and `studies.statistics`. Begin with `study.py` (the
vocabulary), then `load.py` (which folder is read how) and `run_folder.py` (one run's files).
"""
