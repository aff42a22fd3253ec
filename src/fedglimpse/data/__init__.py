"""Datasets and who holds what: from files on disk to the rows of every client.

Begin with `dataset.py` (what a dataset is) and `population.py` (who holds which rows), then
`partition.py` (the registry of splits), `sources.py` (datasets by name) and `config.py` (the
settings). May import `errors`, `fields`, `plugins`, `rng` and `storage`.
"""

from fedglimpse.data.dataset import Dataset

__all__ = ["Dataset"]
