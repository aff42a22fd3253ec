"""What happened in a round on real devices, and the record that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedglimpse.federation.costs import Activity
from fedglimpse.flower.clients import Federation
from fedglimpse.simulation.results import flops_said, logged
from fedglimpse.types import RoundRecord


@dataclass
class Sheet:
    """One round, while it goes on."""

    round_num: int
    visible: list[int]  # ids that could be given work
    chose: bool = False  # the method was asked
    trained: list[int] = field(default_factory=list)  # ids that were sent work to train
    rejected: list[int] = field(default_factory=list)  # ids whose reply was refused
    failed: dict[int, str] = field(default_factory=dict)  # ids without a usable reply, and why
    selected: list[int] = field(default_factory=list)  # ids whose update was used
    weights: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)  # bytes
    info: Mapping[str, Any] = field(default_factory=dict)

    def fail(self, client: int, reason: str, refused: bool = False) -> None:
        """Note a client whose answer cannot be used."""
        self.failed[client] = reason
        if refused and client not in self.rejected:
            self.rejected.append(client)

    def activity(self, fed: Federation, flops: int) -> Activity:
        """Count what the round did."""
        sizes = fed.sizes
        happened = self.chose or bool(self.trained)
        visible = self.visible if happened else []
        selector, aggregator = fed.method.selector, fed.method.aggregator
        return Activity(
            needs=selector.needs if happened else frozenset(),
            needs_after=selector.learns_from | aggregator.needs if self.chose else frozenset(),
            visible=len(visible),
            visible_examples=int(sizes[visible].sum()),
            trained=len(self.trained),
            trained_examples=int(sizes[self.trained].sum()),
            chosen=len(self.selected),
            chosen_examples=int(sizes[self.selected].sum()),
            selector_flops=flops,
            taught=fed.method.objective.distill > 0,
        )

    def record(self, fed: Federation, said: Mapping[str, float], scored: bool) -> RoundRecord:
        """Return the record of the round, but for its wall time."""
        who = type(fed.method.selector).__name__
        answered = f"What {who}.feedback() returned"
        info, metrics = logged(self.info, f"Choice.info of {who}.select()"), logged(said, answered)
        test = fed.problem.test or fed.problem.proxy
        scores = fed.evaluator.score(fed.state, *test) if scored else None
        cost = fed.costs.round(self.activity(fed, flops_said(metrics, answered)))
        losses = self.losses.values()
        chosen = sum(self.received.get(c, 0) for c in self.selected)
        metrics = {name: value for name, value in metrics.items() if name != "server_flops"}
        return RoundRecord(
            lane=0,
            seed=fed.seed,
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
            reward=fed.reward.total,
            extra={**info, **metrics},
            **vars(cost),
            failed={str(c): reason for c, reason in sorted(self.failed.items())},
            received_bytes_chosen=chosen,
            received_bytes_others=sum(self.received.values()) - chosen,
        )
