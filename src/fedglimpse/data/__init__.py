"""Datasets and who holds what: from files on disk to the rows of every client.

Begin with `dataset.py` (what a dataset is) and `population.py` (who holds which rows), then
`partition.py` (how rows are split), `sources.py` (datasets by name) and `config.py` (the settings
and their names). May import `errors`, `fields`, `plugins`, `rng` and `storage`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglimpse.data.dataset import Dataset

__all__ = ["Dataset"]


def __getattr__(name: str) -> Any:
    """Import `Dataset` on first use: the settings in `config.py` are read before torch is."""
    if name == "Dataset":
        from fedglimpse.data.dataset import Dataset

        return Dataset
    raise AttributeError(f"module 'fedglimpse.data' has no attribute {name!r}")
