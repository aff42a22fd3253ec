"""Several methods on the same federation, and the table that says which was better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.runs.summary import Estimate

SMOOTHED_OVER = 10  # scored rounds in the trailing mean that must reach a target
DEFAULT_TARGET = 0.9  # of the best method's final accuracy


@dataclass(frozen=True)
class ToTarget:
    """Rounds until a target accuracy, one entry for each seed; None: not reached."""

    rounds: tuple[int | None, ...]

    def text(self) -> str:
        """Return mean ± interval if every seed got there, else how many did."""
        reached = [r for r in self.rounds if r is not None]
        if len(reached) < len(self.rounds):
            return f"{len(reached)} of {len(self.rounds)} reached it"
        return Estimate.of([float(r) for r in reached]).text(scale=1, digits=0)


@dataclass(frozen=True)
class Row:
    """One method of a comparison."""

    method: str
    final: Estimate
    to_target: ToTarget
    uplink_bytes: float
    client_flops: float
    seconds: float


def first_round_at(records: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Return the first round (counted from 1) whose trailing mean accuracy reaches `target`.

    The mean is over the last 10 scored rounds, or as many as there are.
    """
    recent: list[float] = []
    for record in records:
        if record["accuracy"] is not None:
            recent = [*recent, record["accuracy"]][-SMOOTHED_OVER:]
            if mean(recent) >= target:
                return int(record["round"]) + 1
    return None


def check_target(target: float | None) -> None:
    """Raise UserError where `--target` is no accuracy."""
    if target is not None and not 0 < target <= 1:
        raise UserError(f"--target {target} is not an accuracy: give a share such as 0.8.")


def default_target(summaries: Sequence[Mapping[str, Any]]) -> float:
    """Return 90 % of the best final accuracy among the methods."""
    return DEFAULT_TARGET * max(s["final_accuracy"]["mean"] for s in summaries)


def row_of(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]], target: float) -> Row:
    """Return a method's line in the table."""
    seeds = list(dict.fromkeys(r["seed"] for r in records))
    rounds = tuple(first_round_at([r for r in records if r["seed"] == s], target) for s in seeds)
    return Row(
        method=summary["method"] + (" (oracle)" if records[0].get("oracle") else ""),
        final=Estimate(**summary["final_accuracy"]),
        to_target=ToTarget(rounds),
        uplink_bytes=summary["costs"]["uplink_bytes"],
        client_flops=summary["costs"]["client_flops"],
        seconds=summary["seconds"],
    )


def markdown(rows: Sequence[Row], target: float, over_rounds: int) -> str:
    """Return the table as Markdown, which also reads well in a terminal."""
    head = [
        "method",
        f"accuracy %, last {over_rounds} rounds",
        f"rounds to {target * 100:.1f} %",
        "uplink MB",
        "client GFLOP",
        "seconds",
    ]
    body = [
        [
            row.method,
            row.final.text(),
            row.to_target.text(),
            f"{row.uplink_bytes / 1e6:.1f}",
            f"{row.client_flops / 1e9:.1f}",
            f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]

    def show(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([show(head), rule, *(show(line) for line in body)])
