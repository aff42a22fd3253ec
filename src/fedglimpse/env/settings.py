"""What an environment is made of: the configuration of a run, and the few things a run lacks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation import reports as catalogue

EPISODE_PARTS = ("partition", "visibility", "model")  # what a new seed can change
TARGETS = ("test", "proxy")
UNBOUNDED = ("delta_similarity", "proxy_predictions", "proxy_logits")  # no fixed number of columns


@dataclass(frozen=True)
class Settings:
    """A checked description of an environment."""

    config: Config
    needs: frozenset[
        str
    ]  # of `reports.CATALOGUE`: what clients and server report before the choice
    target: float | None  # an episode ends when this accuracy is reached
    target_on: str  # test: accuracy on the test set; proxy: the unsmoothed reward metric
    vary: frozenset[str]  # of EPISODE_PARTS: what a new seed changes

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of what each visible client reports, in the order of the columns."""
        return tuple(sorted(n for n in self.needs if catalogue.CATALOGUE[n].phase != "server"))


def settings_of(
    config: Config | Mapping[str, Any],
    reports: Collection[str] | None = None,
    target: float | None = None,
    target_on: str = "test",
    vary: Collection[str] = EPISODE_PARTS,
) -> Settings:
    """Check what a user asked for.

    Args:
        config: a `Config`, or a mapping of dotted keys, as for `fedglimpse.run`.
        reports: names of `fedglimpse methods` needs to observe; None: those of `agent.input`.
        target: accuracy at which an episode is terminated; None: never.
        target_on: "test", or "proxy" for an agent that must not learn from the test set.
        vary: what a new seed changes; the rest stays that of the first of `seeds`.

    Raises:
        UserError: for a value that cannot work.
    """
    if not isinstance(config, Config):
        config = resolve(config)
    needs = config.agent.needs if reports is None else frozenset(reports)
    catalogue.check(needs)
    catalogue.check_permission("The environment", needs, config.options)
    for name in sorted(needs & set(UNBOUNDED)):
        raise UserError(
            f"reports={name} has no fixed width, so that it cannot be an observation: use sketch, "
            "delta_sketch, or reports of one number for each client."
        )
    if target is not None and not (math.isfinite(target) and 0 < target <= 1):
        raise UserError(f"target={target} is not an accuracy: use a number in (0, 1], such as 0.8.")
    _check_word("target_on", target_on, TARGETS)
    for name in vary:
        _check_word("vary", name, EPISODE_PARTS)
    return Settings(config, needs, target, target_on, frozenset(vary))


def _check_word(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(
            f"{key}={value!r} is unknown.{nearest(str(value), known)} Use {', '.join(known)}."
        )
