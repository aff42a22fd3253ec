"""Copies of many small tensors that lie side by side: brought home at once, small in a file.

A network in a team is a view of the matrix that holds all of them. Copied or saved as it is, a view
takes everything beside it along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def copied(tree: Any) -> Any:
    """Copy a tree of dicts, lists and tensors; the copies share one tensor of each dtype.

    Args:
        tree: as `state_dict` of a module or an optimizer returns it; other values are kept.

    Returns:
        The same tree, with tensors on the CPU.
    """
    leaves = list(_leaves(tree))
    copies: list[Tensor] = [torch.empty(0)] * len(leaves)
    for kind in {(leaf.dtype, leaf.device) for leaf in leaves}:
        places = [i for i, leaf in enumerate(leaves) if (leaf.dtype, leaf.device) == kind]
        joined = torch.cat([leaves[i].detach().reshape(-1) for i in places]).cpu()
        for i, part in zip(places, joined.split([leaves[i].numel() for i in places]), strict=True):
            copies[i] = part.view(leaves[i].shape)
    return _rebuilt(tree, iter(copies))


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Return the tensors of a tree, in the order of `_rebuilt`."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)


def _rebuilt(tree: Any, copies: Iterator[Tensor]) -> Any:
    """Return the same tree with other tensors."""
    if isinstance(tree, Tensor):
        return next(copies)
    if isinstance(tree, dict):
        return {key: _rebuilt(value, copies) for key, value in tree.items()}
    return [_rebuilt(value, copies) for value in tree] if isinstance(tree, list) else tree
