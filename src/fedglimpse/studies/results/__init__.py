"""Stored results: every cell of a study, read from run folders or from one committed file.

May import `config`, `data`, `runs`, `types` and `studies.statistics`. Begin with `study.py` (the
vocabulary), then `load.py` (which folder is read how) and `run_folder.py` (one run's files).
"""

from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.results.study import CellResult, Partition, Study

__all__ = ["CellResult", "Partition", "Study", "load_study", "write_study"]
