"""Whether a configuration can be run: everything that can be checked before the first round."""

from __future__ import annotations

import torch

from fedglimpse.config.checks import check
from fedglimpse.config.schema import Config
from fedglimpse.data import sources
from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError, reason_of
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.methods.build import build_method
from fedglimpse.runs.build import WorldSetup, device_of
from fedglimpse.runs.experiment import check_policy
from fedglimpse.runs.trackers import LiveLog
from fedglimpse.simulation.trainers.choose import check_trainer

# A federation to try a method on when the run's data are on another machine.
ASSUMED_CLIENTS = 30
ASSUMED_CLASSES = 10
ASSUMED_PARAMS = 1000


class Readiness:
    """Checks configurations as far as their first round; each dataset is loaded once."""

    def __init__(self, on_this_machine: bool = True) -> None:
        """Say where the configurations will run.

        Args:
            on_this_machine: its device, data and packages are checked too.
        """
        self.on_this_machine = on_this_machine
        self._datasets: dict[str, Dataset] = {}

    def check(self, config: Config) -> None:
        """Raise UserError for a configuration that cannot be run; nothing is written."""
        check(config)
        if not self.on_this_machine:
            _check_method(config)
            return
        device = device_of(config)
        registry.check_name(config.method)
        LiveLog(config, None)  # checks that the packages of `log.*` are installed
        setup = WorldSetup(config, self._dataset(config.data.name), torch.device("cpu"), "fp32")
        try:
            model = setup.model(config.seeds[0])
            check_trainer(config.engine.trainer, model, setup.dataset.input_shape, device)
            lane = setup.lane(config, config.seeds[0])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"method={config.method} cannot be built ({reason_of(error)}): fix it or leave it "
                "out.",
                key="method",
            ) from error
        check_policy(config, [lane])

    def _dataset(self, name: str) -> Dataset:
        if name not in self._datasets:
            self._datasets[name] = sources.load(name)
        return self._datasets[name]


def _check_method(config: Config) -> None:
    """Build a method for an assumed federation. A policy file may be on the other machine."""
    if config.agent.load:
        return
    setting = Setting(
        config=config,
        seed=config.seeds[0],
        sizes=torch.ones(config.data.clients or ASSUMED_CLIENTS).long(),
        num_classes=ASSUMED_CLASSES,
        num_params=ASSUMED_PARAMS,
    )
    build_method(config.method, setting)
