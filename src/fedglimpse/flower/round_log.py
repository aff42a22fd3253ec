"""The events of a round on real devices, and the record that is made of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedglimpse.flower.deployment import Deployment
from fedglimpse.simulation.evaluation import Scores
from fedglimpse.simulation.plugin_checks import COUNTED_METRIC, plain_metrics
from fedglimpse.types import RoundRecord

log = logging.getLogger("flwr.fedglimpse")


@dataclass
class RoundLog:
    """One round, filled in while it runs."""

    round_num: int
    visible: list[int]  # ids that could be given work
    chose: bool = False  # the method has selected
    trained: list[int] = field(default_factory=list)  # ids that were sent work to train
    rejected: list[int] = field(default_factory=list)  # ids whose reply was refused
    failed: dict[int, str] = field(default_factory=dict)  # ids without a usable reply, and why
    clipped: dict[int, str] = field(default_factory=dict)  # ids with less weight than reported
    selected: list[int] = field(default_factory=list)  # ids whose update was used
    weights: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # mean training loss by id
    received_bytes: dict[int, int] = field(default_factory=dict)  # by id
    info: Mapping[str, Any] = field(default_factory=dict)  # of the choice

    def fail(self, client: int, reason: str, refused: bool = False) -> None:
        """Note a client whose answer cannot be used."""
        self.failed[client] = reason
        if refused and client not in self.rejected:
            self.rejected.append(client)

    def clip(self, client: int, name: str, reason: str) -> None:
        """Note a client whose weight was clipped; the log says it once a round, by name."""
        self.clipped[client] = reason
        log.warning("Round %d: client '%s': %s.", self.round_num, name, reason)

    def record(
        self,
        deployment: Deployment,
        feedback: Mapping[str, float],
        scores: Scores | None,
    ) -> RoundRecord:
        """Return the record of the round, but for its wall time.

        Args:
            deployment: after the round.
            feedback: metrics of the selector.
            scores: of the global model on the test set, where this round is evaluated.
        """
        selector_name = type(deployment.method.selector).__name__
        info_source = f"Choice.info of {selector_name}.select()"
        feedback_source = f"What {selector_name}.feedback() returned"
        extra = dict(plain_metrics(self.info, info_source))
        metrics = dict(plain_metrics(feedback, feedback_source))
        selector_flops = int(metrics.pop(COUNTED_METRIC, 0))  # counted in the cost
        extra |= metrics
        if self.clipped:
            extra["clipped"] = _by_text(self.clipped)
        visible_sizes = deployment.sizes[self.visible].tolist()
        cost = deployment.costs.round(
            deployment.method,
            examples=dict(zip(self.visible, visible_sizes, strict=True)),
            trained=self.trained,
            selected=self.selected,
            has_choice=self.chose,
            selector_flops=selector_flops,
        )
        losses = self.losses.values()
        all_bytes = sum(self.received_bytes.values())
        chosen_bytes = sum(self.received_bytes.get(client, 0) for client in self.selected)
        return RoundRecord(
            lane=0,
            seed=deployment.seed,
            round=self.round_num,
            visible=self.visible,
            selected=self.selected,
            rejected=sorted(self.rejected),
            weights=self.weights,
            accuracy=None if scores is None else scores.accuracy,
            macro_f1=None if scores is None else scores.macro_f1,
            per_class_f1=None if scores is None else scores.per_class_f1.tolist(),
            loss=None if scores is None else scores.loss,
            train_loss=sum(losses) / len(losses) if losses else None,
            reward=deployment.reward.total,
            extra=extra,
            uplink_bytes=cost.uplink_bytes,
            downlink_bytes=cost.downlink_bytes,
            client_flops=cost.client_flops,
            server_flops=cost.server_flops,
            failed=_by_text(self.failed),
            received_bytes_chosen=chosen_bytes,
            received_bytes_others=all_bytes - chosen_bytes,
        )


def _by_text(reasons: Mapping[int, str]) -> dict[str, str]:
    """Return what is said of clients, by id in JSON's way."""
    return {str(client): reason for client, reason in sorted(reasons.items())}
