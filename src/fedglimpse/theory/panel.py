"""The theory panel of a run: what was measured over rounds beside the terms of the bound."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.theory.bound import Constants, QConstants, Terms, lemma_4, printed, repaired
from fedglimpse.theory.estimate import Point

FILE = "theory.json"


@dataclass(frozen=True)
class LanePanel:
    """One seed of a run."""

    seed: int
    points: list[Point]
    constants: Constants[float]
    q: QConstants[float] | None  # None: no Q-values, or none from which mu > 0 follows
    measured: float  # mean ||grad F||^2, the left-hand side
    accuracy: float  # mean test accuracy over all scored rounds

    @property
    def printed(self) -> Terms[float]:
        """The bound as printed."""
        return printed(self.constants, self.q)

    @property
    def repaired(self) -> Terms[float]:
        """The bound as it can be proved."""
        return repaired(self.constants)

    @property
    def step_condition(self) -> float:
        """L k eta, at most 1 in the theorem."""
        return self.constants.smoothness * self.constants.steps * self.constants.lr

    @property
    def relative_deviation(self) -> float:
        """Mean deviation divided by that of a random choice at the same models."""
        random = sum(p.random_deviation for p in self.points)
        return sum(p.deviation for p in self.points) / random if random else 1.0

    @property
    def lemma_4_by_round(self) -> float | None:
        """Mean of Lemma 4 with each round's own constants; None without mu > 0 in any round."""
        found = [
            lemma_4(p.spread, QConstants(p.delta_q, p.mu, p.l_q), p.selected / p.visible)
            for p in self.points
            if p.delta_q is not None and p.mu and p.l_q is not None
        ]
        return sum(found) / len(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the series over rounds as lists."""
        return {
            "seed": self.seed,
            "series": {f.name: [getattr(p, f.name) for p in self.points] for f in fields(Point)},
            "constants": asdict(self.constants),
            "q": None if self.q is None else asdict(self.q),
            "measured": self.measured,
            "accuracy": self.accuracy,
            "relative_deviation": self.relative_deviation,
            "step_condition": self.step_condition,
            "lemma_4_by_round": self.lemma_4_by_round,
            "printed": asdict(self.printed) | {"total": self.printed.total},
            "repaired": asdict(self.repaired) | {"total": self.repaired.total},
        }

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> LanePanel:
        """Return what `to_json` was made of."""
        series = stored["series"]
        return LanePanel(
            seed=stored["seed"],
            points=[
                Point(**{name: series[name][i] for name in series})
                for i in range(len(series["round"]))
            ],
            constants=Constants(**stored["constants"]),
            q=None if stored["q"] is None else QConstants(**stored["q"]),
            measured=stored["measured"],
            accuracy=stored["accuracy"],
        )


@dataclass(frozen=True)
class Panel:
    """A run's theory in numbers."""

    method: str
    data: str
    notes: Sequence[str]  # what the reader must know before believing it
    lanes: Sequence[LanePanel]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        lanes = [lane.to_json() for lane in self.lanes]
        return {"method": self.method, "data": self.data, "notes": self.notes, "lanes": lanes}


def read_panel(run: Path) -> Panel:
    """Read the `theory.json` of a run folder; raises UserError where it is damaged."""
    try:
        stored = json.loads((run / FILE).read_text(encoding="utf-8"))
        lanes = [LanePanel.from_json(lane) for lane in stored["lanes"]]
        return Panel(stored["method"], stored["data"], stored["notes"], lanes)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{run / FILE} cannot be read ({type(error).__name__}): leave --reuse out to measure "
            "the run again."
        ) from None
