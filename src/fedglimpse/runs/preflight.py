"""Whether a configuration can be run: all that can be known before the first round."""

from __future__ import annotations

from typing import cast

import torch

from fedglimpse.config.checks import check, pick_device
from fedglimpse.config.schema import Config
from fedglimpse.data import sources
from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError, reason_of
from fedglimpse.federation.devices import Precision, check_precision
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.runs.build import Parts
from fedglimpse.runs.experiment import check_policy
from fedglimpse.runs.trackers import LiveLog
from fedglimpse.simulation.trainers.choose import check_trainer

STAND_IN = (30, 10, 1000)  # clients, classes and parameters, where the data lies elsewhere


class Readiness:
    """Tries configurations out, up to their first round; data is loaded once."""

    def __init__(self, here: bool = True) -> None:
        """Say where they will be run.

        Args:
            here: on this machine, so that its device, data and packages are looked at too.
        """
        self.here = here
        self._data: dict[str, Dataset] = {}

    def check(self, config: Config) -> None:
        """Raise UserError for a configuration that cannot be run; nothing is written."""
        check(config)
        if not self.here:
            _check_method(config)
            return
        device = pick_device(config.engine.device)
        check_precision(device, cast(Precision, config.engine.precision))
        registry.find(config.method)
        LiveLog(config, None)
        name = config.data.name
        if name not in self._data:
            self._data[name] = sources.load(name)
        parts = Parts(config, self._data[name], torch.device("cpu"), "fp32")
        try:
            model, shape = parts.model(config.seeds[0]), parts.dataset.input_shape
            check_trainer(config.engine.trainer, model, shape, device)
            lane = parts.lane(config, config.seeds[0])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"method={config.method} cannot be built ({reason_of(error)}): mend it or leave "
                "it out."
            ) from error
        check_policy(config, [lane])


def _check_method(config: Config) -> None:
    """Build a method for a federation that stands in for its own; a policy is not looked for."""
    clients, classes, params = STAND_IN
    sizes = torch.ones(config.data.clients or clients).long()
    if not config.agent.load:
        registry.build(config.method, Setting(config, config.seeds[0], sizes, classes, params))
