"""The arguments of an environment, checked: the configuration of a run and a few things besides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import nearest, require
from fedglimpse.federation import reports as catalogue

EPISODE_PARTS = ("partition", "visibility", "model")  # what a new seed can change
TARGETS = ("test", "proxy")
UNBOUNDED = ("delta_similarity", "proxy_predictions", "proxy_logits")  # no fixed number of columns


@dataclass(frozen=True)
class Settings:
    """A checked description of an environment."""

    config: Config
    needs: frozenset[str]  # what clients and server report before the choice: catalogue names
    target: float | None  # an episode ends when this accuracy is reached
    target_on: str  # test: accuracy on the test set; proxy: the unsmoothed reward metric
    vary: frozenset[str]  # of EPISODE_PARTS: what a new seed changes

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of what each visible client reports, in the order of the columns."""
        of_clients = []
        for name in sorted(self.needs):
            if catalogue.CATALOGUE[name].phase != "server":
                of_clients.append(name)
        return tuple(of_clients)


def settings_of(
    config: Config | Mapping[str, Any],
    reports: Collection[str] | None = None,
    target: float | None = None,
    target_on: str = "test",
    vary: Collection[str] = EPISODE_PARTS,
) -> Settings:
    """Check the arguments of an environment.

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
    for name in UNBOUNDED:
        require(
            name not in needs,
            f"reports={name} has no fixed width, so that it cannot be an observation: use sketch, "
            "delta_sketch, or reports of one number for each client.",
            key="reports",
        )
    require(
        target is None or (math.isfinite(target) and 0 < target <= 1),
        f"target={target} is not an accuracy: use a number in (0, 1], such as 0.8.",
        key="target",
    )
    check_option("target_on", target_on, TARGETS)
    for name in vary:
        check_option("vary", name, EPISODE_PARTS)
    return Settings(config, needs, target, target_on, frozenset(vary))


def check_option(key: str, value: str, options: tuple[str, ...]) -> None:
    """Raise UserError unless `value` is one of `options`."""
    hint = nearest(str(value), options)
    require(
        value in options, f"{key}={value!r} is unknown.{hint} Use {', '.join(options)}.", key=key
    )
