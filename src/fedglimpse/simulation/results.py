"""The results of a round: outcomes for the selectors, records for the run.

On a GPU the scores may still be on their way when `RoundResults` is made, so that a server can
send its clients off to the next round before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedglimpse.federation.costs import CostModel
from fedglimpse.simulation.evaluation import Scores
from fedglimpse.simulation.lane import Lane, LaneRound
from fedglimpse.simulation.plugin_checks import COUNTED_METRIC, plain_metrics, reported_flops
from fedglimpse.types import Outcome, RoundRecord

ScoresByLane = Callable[[], Mapping[int, Scores]]  # waits until they have arrived


@dataclass(frozen=True)
class RoundResults:
    """One finished round of all lanes; lanes that leave or restart afterwards do not matter."""

    lanes: Sequence[Lane]
    rounds: Sequence[LaneRound]
    proxy_scores: ScoresByLane  # of the lanes in which clients were chosen
    test_scores: ScoresByLane  # of the lanes that are evaluated in this round
    costs: CostModel

    def outcomes(self) -> list[Outcome | None]:
        """Return what selectors learn from, and update the rewards; to be called once."""
        outcomes: list[Outcome | None] = [None] * len(self.lanes)
        for r, scores in self.proxy_scores().items():
            lane = self.lanes[r]
            lane_round = self.rounds[r]
            assert lane_round.selected is not None
            learns_from = lane.method.selector.learns_from
            reports = lane_round.reports
            reward, reward_per_class = lane.reward.update(scores)
            outcomes[r] = Outcome(
                round_num=lane_round.round_num,
                selected=lane_round.selected,
                reward=reward,
                score=lane.reward.score(scores),
                per_class=scores.per_class_f1,
                reward_per_class=reward_per_class,
                weights=lane_round.weights.float(),
                reports={name: reports[name] for name in reports if name in learns_from},
            )
        return outcomes

    def records(self, metrics: Sequence[Mapping[str, float] | None]) -> list[dict[str, Any]]:
        """Return one record for each lane, without its wall time; call `outcomes` before.

        Args:
            metrics: what each selector's feedback returned.
        """
        test_scores = self.test_scores()
        records = []
        for r, lane_metrics in enumerate(metrics):
            records.append(self._record(r, lane_metrics, test_scores.get(r)).to_json())
        return records

    def _record(
        self, r: int, feedback: Mapping[str, float] | None, scores: Scores | None
    ) -> RoundRecord:
        lane = self.lanes[r]
        lane_round = self.rounds[r]
        selector_name = type(lane.method.selector).__name__
        feedback_source = f"What {selector_name}.feedback() returned"
        info_source = f"Choice.info of {selector_name}.select()"
        extra = dict(plain_metrics(lane_round.choice_info, info_source))
        metrics = dict(plain_metrics(feedback, feedback_source))
        selector_flops = reported_flops(metrics, feedback_source)
        metrics.pop(COUNTED_METRIC, None)  # counted in the cost
        cost = self.costs.round(lane_round.activity(lane, selector_flops))
        return RoundRecord(
            lane=r,
            seed=lane.seed,
            round=lane_round.round_num,
            visible=list(lane_round.examples),
            selected=[] if lane_round.selected is None else lane_round.selected.tolist(),
            rejected=list(lane_round.rejected_ids),
            weights=lane_round.weights.tolist(),
            accuracy=None if scores is None else scores.accuracy,
            macro_f1=None if scores is None else scores.macro_f1,
            per_class_f1=None if scores is None else scores.per_class_f1.tolist(),
            loss=None if scores is None else scores.loss,
            train_loss=lane_round.train_loss,
            reward=lane.reward.total,
            extra=extra | metrics,
            uplink_bytes=cost.uplink_bytes,
            downlink_bytes=cost.downlink_bytes,
            client_flops=cost.client_flops,
            server_flops=cost.server_flops,
            oracle=True if lane.oracle else None,
        )
