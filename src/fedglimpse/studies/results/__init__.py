"""What was run: every cell of a study, read from a folder or from one committed file."""

from fedglimpse.studies.results.cell import Cell, Partition, Study
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.store import write_study

__all__ = ["Cell", "Partition", "Study", "load_study", "write_study"]
