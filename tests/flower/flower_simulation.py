"""Runs the example's clients in Flower's simulation: `python flower_simulation.py OUT [KEY=VALUE]`.

Its own process, because Ray stays in the one that started it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedglimpse.config.loading import parse_overrides, resolve

if __name__ == "__main__":
    from client_app import app as client
    from task import make_model, server_data

    from fedglimpse.flower.strategy import GlimpseStrategy, Problem

    config = resolve(parse_overrides(sys.argv[2:]))
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = GlimpseStrategy(
            config, Problem(make_model, **server_data(config)), out=sys.argv[1]
        )
        user_settings = {f"data.{name}": value for name, value in asdict(config.data).items()}
        user_settings["seed"] = config.seeds[0]
        strategy.start(grid=grid, train_config=ConfigRecord(user_settings))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, config.data.clients, backend_config=resources)
