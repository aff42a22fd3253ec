"""Which rows of the training set the clients of all lanes hold, kept where they train.

A round's jobs are cut out of one long list on the device. `Population.take` is the readable twin,
and what clients get whose rows are drawn when they are seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse.data.population import Population
from fedglimpse.sim.transfer import sent


class Holdings:
    """The rows of all clients of some populations, one after the other."""

    def __init__(self) -> None:
        """Start with nobody."""
        # by identity; where the rows of each client begin, and where those of the last end
        self._known: dict[int, tuple[Population, list[int]]] = {}
        self._rows = torch.zeros(0, dtype=torch.long)

    def keep(self, populations: Sequence[Population], device: torch.device) -> None:
        """Hold the rows of all these populations, and of no others where some are new.

        Args:
            populations: of all lanes; those whose clients draw their rows are left out.
            device: where they train.
        """
        if all(id(one) in self._known or not _dealt(one) for one in populations):
            return
        self._known.clear()
        rows: list[Tensor] = []
        count = longest = 0
        for population in {id(one): one for one in populations if _dealt(one)}.values():
            begins = [count]
            for own in population.rows:
                rows.append(own)
                count, longest = count + len(own), max(longest, len(own))
                begins.append(count)
            self._known[id(population)] = population, begins
        rows.append(torch.zeros(longest, dtype=torch.long))  # nothing is read beyond the end
        self._rows = torch.cat(rows).to(device)

    def sizes(self, population: Population, clients: Sequence[int]) -> list[int]:
        """Return how many rows some clients of a kept population hold."""
        if not _dealt(population):
            return population.sizes[list(clients)].tolist()
        begins = self._known[id(population)][1]
        return [begins[i + 1] - begins[i] for i in clients]

    def take(
        self,
        populations: Sequence[Population],
        clients: Sequence[Sequence[int]],
        sizes: Tensor,
        width: int,
    ) -> Tensor:
        """Return the rows of some clients of every population, padded with 0 `[J, n]`.

        Args:
            populations: some of those that are kept.
            clients: ids, for each of the populations.
            sizes: how many rows each of the clients holds; the table is made where this is.  # [J]
            width: n, the largest of the sizes.
        """
        pairs = list(zip(populations, clients, strict=True))
        if not all(map(_dealt, populations)):
            rows = [population.rows[i] for population, ids in pairs for i in ids]
            return pad_sequence(rows, batch_first=True).to(sizes.device)
        places = [(self._known[id(population)][1], ids) for population, ids in pairs]
        firsts = np.array([begin[i] for begin, ids in places for i in ids], dtype=np.int64)
        columns = torch.arange(width, device=sizes.device)
        cells = sent(torch.from_numpy(firsts), sizes.device)[:, None] + columns  # [J, n]
        return self._rows[cells].masked_fill(columns >= sizes[:, None], 0)


def _dealt(population: Population) -> bool:
    """True where clients hold their rows from the start, not drawn when they are seen."""
    return isinstance(population.rows, tuple)
