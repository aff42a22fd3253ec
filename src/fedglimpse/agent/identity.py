"""Identity-aware embedding: one trainable vector per client, the paper's Eq. (idemb).

Clients come and go, and new ones may join at any time, so the table grows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedglimpse import rng

_BLOCK = 64  # rows drawn together; a row's first value depends on the seed and its id only


def fresh_rows(seed: int, start: int, stop: int, dim: int) -> Tensor:
    """Draw the first values of rows `start..stop-1`, whatever was drawn before `[rows, dim]`."""
    blocks = range(start // _BLOCK, (stop + _BLOCK - 1) // _BLOCK)
    drawn = [torch.randn(_BLOCK, dim, generator=rng.generator(seed, "identity", b)) for b in blocks]
    first = blocks.start * _BLOCK
    return torch.cat(drawn)[start - first : stop - first]


class TableIdentity(nn.Module):
    """A table with one row per client id that doubles when a larger id appears."""

    def __init__(self, dim: int, seed: int, rows: int = 128) -> None:
        super().__init__()
        self.dim = dim
        self._seed = seed
        self.weight = nn.Parameter(fresh_rows(seed, 0, rows, dim))  # [rows, dim]
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids `[B, V]` -> `[B, V, dim]`."""
        return self.norm(nn.functional.embedding(ids, self.weight))

    def grow(self, rows: int) -> bool:
        """Make room for ids below `rows`; True where the table changed its size.

        The parameter object stays the same, so an optimizer keeps its hold on it.
        """
        have = len(self.weight)
        if rows <= have:
            return False
        while have < rows:
            have *= 2
        self._extend(have)
        return True

    def _extend(self, rows: int) -> None:
        more = fresh_rows(self._seed, len(self.weight), rows, self.dim).to(self.weight.device)
        self.weight.grad = None
        self.weight.data = torch.cat([self.weight.data, more])

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        """Take over the size of a saved table before its rows are copied."""
        saved = state.get(prefix + "weight")
        if saved is not None and saved.shape != self.weight.shape and saved.shape[1] == self.dim:
            self.weight.grad = None
            self.weight.data = saved.to(self.weight).clone()
        super()._load_from_state_dict(state, prefix, *rest)


class NoIdentity(nn.Module):
    """The ablation without client memory: an embedding of width zero."""

    dim = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Return `[B, V, 0]`."""
        return torch.zeros(*ids.shape, 0, device=ids.device)

    def grow(self, rows: int) -> bool:
        """Nothing to do."""
        return False


Identity = TableIdentity | NoIdentity


def build_identity(kind: str, dim: int, seed: int) -> Identity:
    """Build the identity module named by `AgentConfig.identity`."""
    return TableIdentity(dim, seed) if kind == "table" else NoIdentity()
