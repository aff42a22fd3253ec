"""Which methods can run over Flower, and how their rounds go."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation import reports as catalogue
from fedglimpse.federation.reports import CATALOGUE, PERMISSION
from fedglimpse.flower.device import asked
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.simulation.lane import check_method
from fedglimpse.types import Method

FROM_STATES = frozenset({"delta_similarity", "proxy_logits"})  # only the server can compute them


WITHOUT_EFFECT = (  # a user who sets one of these waits for something that does not come
    "log.tensorboard",
    "log.wandb",
    "log.mlflow",
    "log.own",
    "checkpoint.keep_models",
)


@dataclass(frozen=True)
class Plan:
    """How a method's rounds go, and what its clients are asked for."""

    asks_all: bool  # every visible client is asked before the choice
    trains_all: bool  # ... and trains
    uploads_all: bool  # ... and sends its whole update
    now: frozenset[str]  # reports before the choice
    after: frozenset[str]  # reports that come with the update
    ours: frozenset[str]  # reports that the server reads off the updates
    objectives: frozenset[str]

    @property
    def wanted(self) -> frozenset[str]:
        """What a client must be able to do."""
        return self.now | self.after | self.objectives


def check_served(config: Config) -> None:
    """Raise UserError for a setting that only the simulator follows."""
    flat = config.flat()
    for name in WITHOUT_EFFECT:
        if flat[name]:
            raise UserError(f"{name}={flat[name]} has no effect on devices: leave it out.")


def method_of(setting: Setting) -> Method:
    """Build a method to look at; UserError where it cannot run on devices.

    It is built as if it were allowed to be an oracle: a user who is told to allow it, as in the
    simulator, would be refused all the same.
    """
    config = setting.config
    allowed = replace(config, options={**config.options, PERMISSION: True})
    method = registry.build(config.method, replace(setting, config=allowed))
    plan_of(method, config)
    return method


def plan_of(method: Method, config: Config) -> Plan:
    """Return how the method's rounds go, or raise UserError where it cannot run on devices."""
    check_method(method)
    selector, later = method.selector, method.selector.learns_from | method.aggregator.needs
    for name in sorted(selector.needs | later):
        if CATALOGUE[name].oracle:
            raise UserError(
                f"method={config.method} reads '{name}', which no real server may know, so it "
                "cannot run on devices: run it in the simulator, or choose another method."
            )
    if config.options.get(PERMISSION):
        raise UserError(
            f"options.{PERMISSION}={config.options[PERMISSION]} has no effect on devices, where "
            "nothing private is read: leave it out."
        )
    asks = frozenset(n for n in selector.needs if CATALOGUE[n].phase != "server")
    trains_all = catalogue.trains_before_choice(selector.needs)
    uploads_all = bool(asks & FROM_STATES)
    ours = frozenset(n for n in later if CATALOGUE[n].from_upload) | FROM_STATES & (later | asks)
    after = frozenset(n for n in later - ours if CATALOGUE[n].phase != "server")
    return Plan(
        asks_all=bool(asks),
        trains_all=trains_all,
        uploads_all=uploads_all,
        now=asks - FROM_STATES,
        after=after,
        ours=ours,
        objectives=asked(method.objective),
    )
