"""Real data: where it is, how it is split, who holds what."""

from fedglimpse.data.dataset import Dataset

__all__ = ["Dataset"]
