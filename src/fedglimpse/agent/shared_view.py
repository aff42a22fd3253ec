"""What several agents see, put together for one pass, and what is told of it.

The same as in `Agent.look`, for all of them in one go; every row is computed by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.agent import Agent
from fedglimpse.agent.attention import entropies
from fedglimpse.agent.config import AgentConfig
from fedglimpse.agent.history import Numbers, standardised
from fedglimpse.agent.inputs import Observation, clean, finite, reported
from fedglimpse.types import View

_Kind = TypeVar("_Kind", bound=Hashable)


def alike(kinds: Mapping[int, _Kind]) -> dict[_Kind, list[int]]:
    """Return the lanes of every kind."""
    lanes: dict[_Kind, list[int]] = {}
    for lane, kind in kinds.items():
        lanes.setdefault(kind, []).append(lane)
    return lanes


def take_in(agents: Sequence[Agent], seen: Mapping[int, View]) -> dict[int, Tensor]:
    """Let agents remember the global sketches `[D]` of their views, which are returned.

    Args:
        agents: of all lanes.
        seen: lane -> its view.
    """
    rows = torch.stack([view.server["global_sketch"].float() for view in seen.values()])
    sketches = dict(zip(seen, finite(rows).unbind(), strict=True))
    for r, view in seen.items():
        agents[r].take_in(view, sketches[r])
    return sketches


def features(seen: Mapping[int, View], config: AgentConfig) -> dict[int, Tensor]:
    """Return the features `[V, F]` of visible clients, sets of one size in one go."""
    found: dict[int, Tensor] = {}
    for lanes in alike({r: view.num_visible for r, view in seen.items()}).values():
        rows = torch.stack([reported(seen[r], config.input) for r in lanes])
        found |= zip(lanes, clean(rows, config.standardise).unbind(), strict=True)
    return found


def observe(
    agents: Sequence[Agent], views: Sequence[View], clients: Sequence[Tensor], width: int
) -> Observation:
    """Put together what R agents see now, one round each `[R, 1, ...]`.

    Args:
        agents: who sees.
        views: what they are shown.
        clients: features of the visible clients.  # [V, F] each
        width: slots of the observation.
    """
    pasts, exist = zip(*(agent.history.window() for agent in agents), strict=True)
    history = torch.stack(pasts)
    if agents[0].config.normalise_history:
        history = standardised(history, scales(agents))
    counts = torch.tensor([view.num_visible for view in views])
    one_round = Observation(
        clients=torch.stack([_wide(rows, width) for rows in clients]),
        ids=torch.stack([_wide(view.ids, width) for view in views]),
        mask=torch.arange(width) < counts[:, None],
        history=history,
        history_mask=torch.stack(exist),
    )
    return Observation(*(tensor.unsqueeze(1).to(agents[0].device) for tensor in one_round))


def _wide(rows: Tensor, width: int) -> Tensor:
    """Pad the first dimension of `[V, ...]` with zeros."""
    missing = width - rows.shape[0]
    return F.pad(rows, (0,) * 2 * (rows.dim() - 1) + (0, missing)) if missing else rows


def scales(agents: Sequence[Agent]) -> Numbers:
    """Return by what the agents' histories are standardised, `[R, 1, D]` each."""
    columns = zip(*(agent.scale.numbers() for agent in agents), strict=True)
    return Numbers(*(torch.stack(column)[:, None] for column in columns))


def means_of(scores: Tensor, counts: Sequence[int]) -> dict[int, float]:
    """Return the mean score of each lane's real clients, of scores `[R, width]`."""
    means: dict[int, float] = {}
    for count, places in alike(dict(enumerate(counts))).items():
        means |= zip(places, scores[places, :count].mean(dim=1).tolist(), strict=True)
    return means


def spreads_of(weights: Tensor | None, counts: Sequence[int]) -> dict[int, float | None]:
    """Return the entropy of each lane's attention `[R, h, H+1, width]` to its real clients."""
    spreads: dict[int, float | None] = dict.fromkeys(range(len(counts)))
    if weights is not None:
        for count, places in alike(dict(enumerate(counts))).items():
            own = weights[places, :, :, :count]
            spreads |= zip(places, entropies(own).tolist(), strict=True)
    return spreads
