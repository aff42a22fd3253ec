"""What a configuration may not say, in sentences a user can act on.

What a single setting may be stands beside its field in `schema.py`; here are the rules that hold
between settings, and those that need the number of clients. Imports no torch, so that a mistake is
answered at once; whether the machine has the device is found out by `federation/devices.py`.
"""

from __future__ import annotations

import re

from fedglimpse.config.schema import Config
from fedglimpse.errors import require
from fedglimpse.federation.visibility import check_sizes, check_visibility
from fedglimpse.fields import check_fields

DEVICE = re.compile(r"auto|(cpu|cuda)(:(0|[1-9]\d?))?")


def check(config: Config) -> None:
    """Raise UserError for the first value that cannot work; touches nothing."""
    check_fields(config)
    _check_seeds(config.seeds)
    local = config.local
    require(
        not local.momentum or local.optimizer == "sgd",
        f"local.momentum={local.momentum} has no effect with local.optimizer={local.optimizer}: "
        "leave it out, or use local.optimizer=sgd.",
        key="local.momentum",
    )
    check_visibility(config.visibility)
    require(
        DEVICE.fullmatch(config.engine.device) is not None,
        f"engine.device={config.engine.device!r} is unknown: use auto, cpu, cuda or cuda:1.",
        key="engine.device",
    )
    require(
        config.data.clients > 0 or config.data.by_subject,
        f"data.clients=0 needs data.partition=subject, but it is {config.data.partition}: give "
        "the number of clients, such as data.clients=100.",
        key="data.clients",
    )
    if config.data.clients:
        check_counts(config, config.data.clients)


def _check_seeds(seeds: tuple[int, ...]) -> None:
    require(
        len(seeds) > 0, "seeds=[] is empty: give at least one seed, such as seeds=[0].", key="seeds"
    )
    require(
        len(set(seeds)) == len(seeds),
        f"seeds={list(seeds)} repeats a seed: give each one once.",
        key="seeds",
    )


def check_counts(config: Config, num_clients: int) -> None:
    """Check what depends on N, the number of clients."""
    require(
        config.selection.k <= num_clients,
        f"selection.k={config.selection.k} is more than the {num_clients} clients there are: use "
        f"at most {num_clients}.",
        key="selection.k",
    )
    check_sizes(config.visibility, num_clients)
