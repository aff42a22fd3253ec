"""One run from inside: who was visible, who was chosen, and the agent's Q-values and attention."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedglimpse.studies.statistics.condense import thinned

Record = Mapping[str, Any]
MOMENTS = 12  # rounds whose Q-values and attention are stored
MAX_ROUNDS = 1500  # of the raster; of a longer run only the start is shown


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
class RunTrace:
    """The participation raster of one run and a few of its moments."""

    clients: int  # N
    rounds: int  # T
    visible: str  # base64 of the packed bits of a [T, N] matrix
    selected: str
    moments: Sequence[Moment] = ()


def trace_of(records: Sequence[Record], clients: int) -> RunTrace:
    """Build the trace of one seed from its records."""
    raster = records[:MAX_ROUNDS]
    scored = list(filter(_has_scores, records))
    with_attention = [record for record in scored if "attention" in record]
    candidates = with_attention or scored  # attention may be logged in some rounds only
    moments: list[Moment] = []
    for i in thinned(len(candidates), MOMENTS):
        moments.append(_moment(candidates[i]))
    visible = [record["visible"] for record in raster]
    selected = [record["selected"] for record in raster]
    return RunTrace(
        clients=clients,
        rounds=len(raster),
        visible=pack(visible, clients),
        selected=pack(selected, clients),
        moments=moments,
    )


def pack(rows: Sequence[Sequence[int]], width: int) -> str:
    """Write sets of ids below `width` as the base64 of a bit matrix."""
    bits = np.zeros((len(rows), width), dtype=bool)
    for line, ids in zip(bits, rows, strict=True):
        line[list(ids)] = True
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def unpack(text: str, rows: int, width: int) -> list[list[int]]:
    """Read what `pack` wrote."""
    packed = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    bits = np.unpackbits(packed)
    matrix = bits[: rows * width].reshape(rows, width)
    ids: list[list[int]] = []
    for line in matrix:
        ids.append(np.flatnonzero(line).tolist())
    return ids


def _candidate_ids(record: Record) -> list[int]:
    """Return the clients a selector could choose from: visible, with a finite update."""
    rejected = record["rejected"]
    return [i for i in record["visible"] if i not in rejected]


def _has_scores(record: Record) -> bool:
    scores = record.get("q", ())
    if not isinstance(scores, list):  # a user's own selector may log something else as `q`
        return False
    count = len(_candidate_ids(record))
    return len(scores) == count > 0 and _are_finite(scores)


def drawable(attention: Any, clients: int) -> Sequence[Sequence[float]] | None:
    """Return attention weights that can be drawn, a row of finite numbers for each client.

    Anything else gives None: the weights of a network that diverged, or whatever a user's own
    selector logs under this name.
    """
    if not isinstance(attention, list) or len(attention) != clients:
        return None
    for row in attention:
        if not isinstance(row, list) or not _are_finite(row):
            return None
    return attention


def _are_finite(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _moment(record: Record) -> Moment:
    clients = _candidate_ids(record)
    epsilon = record.get("epsilon")
    return Moment(
        round=record["round"] + 1,
        clients=clients,
        chosen=record["selected"],
        q=record["q"],
        attention=drawable(record.get("attention"), len(clients)),
        behaviour=str(record.get("behaviour", "")),
        epsilon=epsilon if _are_finite([epsilon]) else None,
    )
