"""What each method costs, against the formulas of its page: k of |C| visible clients, d floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedglimpse.methods import registry
from fedglimpse.runs.experiment import run

FLOAT = 4


@dataclass(frozen=True)
class Facts:
    """One round, in the letters of the formulas."""

    k: int  # chosen
    v: int  # visible, |C|
    n_k: int  # examples of the chosen
    n_v: int  # examples of the visible
    d: int  # floats of a model
    params: int
    sketch: int
    proxy: int
    classes: int
    clients: int
    forward: int  # FLOPs of an example
    train: int
    epochs: int


@dataclass(frozen=True)
class Cost:
    """What a round costs beyond the k models that FedAvg moves and trains."""

    up: Callable[[Facts], float] = lambda f: 0  # floats
    down: Callable[[Facts], float] = lambda f: 0  # floats
    client: Callable[[Facts], float] = lambda f: 0  # FLOPs
    server: Callable[[Facts], float] = lambda f: 0  # FLOPs; of a method that learns: at least


def others_train(f: Facts) -> float:
    return (f.n_v - f.n_k) * f.epochs * f.train


def others_receive(f: Facts) -> float:
    return (f.v - f.k) * f.d


def taught(f: Facts) -> float:
    return f.n_k * f.epochs * f.forward  # the teacher's pass


NOTHING = Cost()


def score_proxy(f: Facts) -> float:
    return f.proxy * f.forward


def two_losses(f: Facts) -> float:
    return 2 * f.n_k * f.forward


SKETCHES = Cost(up=lambda f: f.v * f.sketch, down=others_receive, client=others_train)
EXTRA: dict[str, Cost] = {
    "fedavg": NOTHING,
    "fedprox": NOTHING,
    "fedavg-window": NOTHING,
    "edgeflow": NOTHING,  # k = |C|
    "ha-edgeflow": Cost(
        up=lambda f: f.v,
        down=lambda f: others_receive(f) + f.v * f.d,  # the proxy gradient too
        client=lambda f: 3 * f.n_v * f.forward,
        server=lambda f: 3 * f.proxy * f.forward,
    ),
    "fedawac": Cost(server=lambda f: f.k * f.proxy * f.forward),
    "f3ast": NOTHING,
    "mifa": Cost(server=lambda f: f.clients * f.params),
    "herd": SKETCHES,
    "dpp": SKETCHES,
    "oracle-balance": NOTHING,  # what it knows is not to be had at any price
    "power-of-choice": Cost(  # m = |C| candidates
        up=lambda f: f.v, down=others_receive, client=lambda f: f.n_v * f.forward
    ),
    "oort": Cost(up=lambda f: f.k),
    "fedawe": NOTHING,
    "fedabc": Cost(
        up=lambda f: f.v * f.proxy * f.classes,
        down=others_receive,
        client=lambda f: others_train(f) + f.v * f.proxy * f.forward,
        server=lambda f: f.v**2 * f.proxy * f.classes,
    ),
    "fedacs": Cost(
        up=others_receive,  # every visible client uploads its model
        down=others_receive,
        client=others_train,
        server=lambda f: f.v**2 * f.params,
    ),
    "sequential": NOTHING,
    "snake": Cost(client=taught),
    "glimpse": Cost(  # norm, training loss, and the loss of the model that was received
        up=lambda f: 3 * f.v,
        down=others_receive,
        client=lambda f: others_train(f) + f.n_v * f.forward,
        server=score_proxy,
    ),
    "glimpse, tuned-1": replace(SKETCHES, server=score_proxy),
    "favor": Cost(server=score_proxy),
    "flash-rl": Cost(server=score_proxy),
    "fedagent": Cost(client=taught, server=score_proxy),
    "feddrl": Cost(up=lambda f: 2 * f.k, client=two_losses),
    "fedppo": Cost(up=lambda f: 2 * f.k, client=two_losses, server=score_proxy),
    "palit": Cost(server=score_proxy),
}
PRESETS = {"glimpse, tuned-1": {"method": "glimpse", "preset": "tuned-1"}}
LEARNERS = {"glimpse", *PRESETS, "favor", "flash-rl", "fedagent", "feddrl", "fedppo", "palit"}


@pytest.mark.parametrize("name", [*registry.MODULES, *PRESETS])
def test_costs_follow_the_formulas(name: str) -> None:
    what = PRESETS.get(name, {"method": name})
    examples = registry.info(what["method"]).example_options
    options = {f"options.{k}": v for k, v in examples.items()}
    small: dict[str, Any] = {"data.clients": 12, "visibility.cluster_size": 4, "selection.k": 2}
    uneven = {"data.equal_size": False, "data.alpha": 1.0, "data.min_size": 5, "local.epochs": 2}
    result = run({**what, "rounds": 2, **small, **uneven, **options})
    world = result.world
    sizes = result.world.lanes[0].population.sizes
    for record in result.records:
        chosen = record["selected"]
        visible = record["visible"]
        f = Facts(
            k=len(chosen),
            v=len(visible),
            n_k=int(sizes[chosen].sum()),
            n_v=int(sizes[visible].sum()),
            d=world.states.shape[1],
            params=world.reporter.num_params,
            sketch=128,
            proxy=len(world.lanes[0].population.proxy),
            classes=10,
            clients=12,
            forward=world.costs.flops.forward,
            train=world.costs.flops.train,
            epochs=2,
        )
        assert f.v == 4
        assert f.k == (4 if name == "edgeflow" else 2) or name == "fedabc"
        extra = EXTRA[name]
        assert record["uplink_bytes"] == FLOAT * (f.k * f.d + extra.up(f))
        assert record["downlink_bytes"] == FLOAT * (f.k * f.d + extra.down(f))
        assert record["client_flops"] == f.n_k * f.epochs * f.train + extra.client(f)
        server = 2 * f.k * f.d + extra.server(f)
        if name in LEARNERS:
            assert record["server_flops"] > server  # and their networks, tested with them
        else:
            assert record["server_flops"] == server
