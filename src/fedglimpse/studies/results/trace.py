"""What one run looked like from inside: who was visible, who was chosen, what the agent thought."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedglimpse.studies.statistics.condense import thinned

MOMENTS = 12  # rounds whose Q-values and attention are kept
MAX_ROUNDS = 1500  # of the raster; a longer run is shown from its start


@dataclass(frozen=True)
class Moment:
    """What the agent saw and did in one round. Lists run over the same clients."""

    round: int  # counted from 1
    clients: Sequence[int]  # [V]
    chosen: Sequence[int]  # ids
    q: Sequence[float]  # [V]
    attention: Sequence[Sequence[float]] | None  # [V, H+1], newest model last, mean over heads
    behaviour: str  # "greedy", "random", ...
    epsilon: float | None


@dataclass(frozen=True)
class Trace:
    """The participation raster of one run and a few of its moments."""

    clients: int  # N
    rounds: int  # T
    visible: str  # base64 of the packed bits of a [T, N] matrix
    selected: str
    moments: Sequence[Moment] = ()


def trace_of(records: Sequence[Mapping[str, Any]], clients: int) -> Trace:
    """Build the trace of one seed from its records."""
    shown = records[:MAX_ROUNDS]
    thinking = [r for r in records if _has_scores(r)]
    thinking = [r for r in thinking if "attention" in r] or thinking  # logged in some rounds only
    return Trace(
        clients=clients,
        rounds=len(shown),
        visible=pack([r["visible"] for r in shown], clients),
        selected=pack([r["selected"] for r in shown], clients),
        moments=[_moment(thinking[i]) for i in thinned(len(thinking), MOMENTS)],
    )


def pack(rows: Sequence[Sequence[int]], width: int) -> str:
    """Write sets of ids below `width` as the base64 of a bit matrix."""
    bits = np.zeros((len(rows), width), dtype=bool)
    for line, ids in zip(bits, rows, strict=True):
        line[list(ids)] = True
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def unpack(text: str, rows: int, width: int) -> list[list[int]]:
    """Read what `pack` wrote."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8))
    matrix = bits[: rows * width].reshape(rows, width)
    return [np.flatnonzero(line).tolist() for line in matrix]


def _viewed(record: Mapping[str, Any]) -> list[int]:
    """Return the clients a selector could choose from: visible, with a finite update."""
    return [i for i in record["visible"] if i not in record["rejected"]]


def _has_scores(record: Mapping[str, Any]) -> bool:
    scores = record.get("q", ())
    if not isinstance(scores, list):  # a selector of the user's own may mean something else by it
        return False
    return len(scores) == len(_viewed(record)) > 0 and _are_finite(scores)


def drawable(attention: Any, clients: int) -> Sequence[Sequence[float]] | None:
    """Return attention weights that can be drawn, a row of finite numbers for each client.

    Anything else gives None: the weights of a network that diverged, or what a selector of the
    user's own means by the word.
    """
    if not isinstance(attention, list) or len(attention) != clients:
        return None
    return attention if all(isinstance(r, list) and _are_finite(r) for r in attention) else None


def _are_finite(values: Sequence[Any]) -> bool:
    return all(type(v) in (int, float) and math.isfinite(v) for v in values)


def _moment(record: Mapping[str, Any]) -> Moment:
    clients, epsilon = _viewed(record), record.get("epsilon")
    return Moment(
        round=record["round"] + 1,
        clients=clients,
        chosen=record["selected"],
        q=record["q"],
        attention=drawable(record.get("attention"), len(clients)),
        behaviour=str(record.get("behaviour", "")),
        epsilon=epsilon if _are_finite([epsilon]) else None,
    )
