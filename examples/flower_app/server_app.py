"""The server: sees some clients in each round and chooses among them."""

from dataclasses import asdict

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from task import make_model, server_data

from fedglimpse.flower.strategy import GlimpseStrategy, Problem, from_run_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the app's configuration describes."""
    config, terms, out = from_run_config(context.run_config)
    strategy = GlimpseStrategy(config, Problem(make_model, **server_data(config)), terms, out)
    # Clients cut their share of the demonstration's data by these settings, see task.py.
    settings = {f"data.{name}": value for name, value in asdict(config.data).items()}
    settings["seed"] = config.seeds[0]
    strategy.start(grid=grid, train_config=ConfigRecord(settings))
