"""A round whose models are merged: what came of it, once its scores are home.

The scores may still be on their way when this is made. So a server can send its clients off to the
next round first, and do its books while they train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.federation.costs import CostModel
from fedglimpse.simulation.evaluation import Scores
from fedglimpse.simulation.lane import Lane, LaneRound, Upload, kind_of
from fedglimpse.types import RECORD_FIELDS, Outcome, RoundRecord

ScoresByLane = Callable[[], Mapping[int, Scores]]  # waits until they are there


PLAIN = frozenset({bool, int, float, str, type(None)})


def check_logged(*parts: Mapping[str, Any]) -> None:
    """Raise UserError where a selector logs something by a name that is measured."""
    for name in (name for part in parts for name in part if name in RECORD_FIELDS):
        if name != "server_flops":  # added to what the world counts
            raise UserError(
                f"The selector logs '{name}', which is measured: choose another name in "
                "feedback() or Choice.info."
            )


def logged(said: object, source: str) -> Mapping[str, Any]:
    """Return what a selector logs as a record can hold it; UserError where it cannot.

    Numbers are taken out of tensors and of numpy's scalars; None is nothing.

    Args:
        said: what the selector gave.
        source: where it gave it, to begin a sentence with.
    """
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise UserError(
            f"{source} is {kind_of(said)}: give a dict of names and numbers, such as "
            '{"mean_norm": 0.5}, or nothing.'
        )
    for name in said:
        if not isinstance(name, str):
            raise UserError(f"{source} has the name {name!r}: use words as names.")
    check_logged(said)
    if PLAIN.issuperset(map(type, said.values())):
        return said
    plain = {}
    for name, value in said.items():
        try:
            plain[name] = _plain(value)
        except TypeError as error:
            raise UserError(
                f"{source} holds {error} as '{name}', which no record can: give a number, a word, "
                "or a list of these, such as tensor.tolist()."
            ) from None
    return plain


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; TypeError, which says what it is, where JSON has no such."""
    if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        fits = PLAIN.issuperset(map(type, value))
        return list(value) if fits else [_plain(some) for some in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {key: _plain(some) for key, some in value.items()}
    raise TypeError(kind_of(value))


def flops_said(metrics: Mapping[str, Any], source: str) -> int:
    """Return what a selector says that it computed."""
    flops = metrics.get("server_flops", 0)
    if not isinstance(flops, int | float) or not math.isfinite(flops):
        raise UserError(f"{source} has server_flops={flops!r}: give a finite number.")
    return int(flops)


@dataclass
class Played:
    """One round of all lanes; lanes that leave or start again meanwhile do not matter."""

    lanes: Sequence[Lane]
    now: Sequence[LaneRound]
    rounds: Sequence[int]  # the number of the round, lane by lane
    uploads: Mapping[int, Upload]
    on_proxy: ScoresByLane  # of the lanes that merged something
    costs: CostModel

    def outcomes(self) -> list[Outcome | None]:
        """Say what came of the round and move the rewards on; to be called once."""
        outcomes: list[Outcome | None] = [None] * len(self.lanes)
        for r, scores in self.on_proxy().items():
            lane, upload = self.lanes[r], self.uploads[r]
            reward, per_class = lane.reward.update(scores)
            learns_from = lane.method.selector.learns_from
            outcomes[r] = Outcome(
                round_num=self.rounds[r],
                selected=upload.clients.ids,
                reward=reward,
                score=lane.reward.score(scores),
                per_class=scores.per_class_f1,
                reward_per_class=per_class,
                weights=upload.weights.float(),
                reports={n: v for n, v in upload.reports.items() if n in learns_from},
            )
        return outcomes

    def records(
        self, metrics: Sequence[Mapping[str, float] | None], on_test: ScoresByLane
    ) -> list[dict[str, Any]]:
        """Return one record for each lane, after `outcomes`.

        Args:
            metrics: what each selector's feedback returned.
            on_test: scores of the lanes that were evaluated.
        """
        found = on_test()
        return [self._record(r, metrics[r], found.get(r)) for r in range(len(self.lanes))]

    def _record(
        self, r: int, said: Mapping[str, float] | None, scores: Scores | None
    ) -> dict[str, Any]:
        lane, now = self.lanes[r], self.now[r]
        who = type(lane.method.selector).__name__
        answered = f"What {who}.feedback() returned"
        info, metrics = logged(now.info, f"Choice.info of {who}.select()"), logged(said, answered)
        cost = self.costs.round(now.activity(lane, flops_said(metrics, answered)))
        metrics = {name: value for name, value in metrics.items() if name != "server_flops"}
        record = RoundRecord(
            lane=r,
            seed=lane.seed,
            round=self.rounds[r],
            visible=now.visible,
            selected=now.selected,
            rejected=now.rejected,
            weights=now.weights,
            accuracy=None if scores is None else scores.accuracy,
            macro_f1=None if scores is None else scores.macro_f1,
            per_class_f1=None if scores is None else scores.per_class_f1.tolist(),
            loss=None if scores is None else scores.loss,
            train_loss=now.train_loss,
            reward=lane.reward.total,
            extra={**info, **metrics},
            **vars(cost),
            oracle=True if lane.oracle else None,
        )
        return record.to_json()
