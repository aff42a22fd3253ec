"""What was run: every cell of a study, read from a folder or from one committed file."""

from fedglimpse.study.cell import Cell, Partition, Study
from fedglimpse.study.load import load_study
from fedglimpse.study.store import write_study

__all__ = ["Cell", "Partition", "Study", "load_study", "write_study"]
