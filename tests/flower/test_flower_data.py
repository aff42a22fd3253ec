"""Devices whose data comes and goes, and the settings and questions they get about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import small_federation as small
from fake_grid import FakeNode
from torch import Tensor, nn

from fedglimpse.config.schema import SketchConfig
from fedglimpse.data.dataset import as_input
from fedglimpse.errors import UserError
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.flower import messages as wire
from fedglimpse.flower.client import client_app
from fedglimpse.flower.clients import KnownClients
from fedglimpse.flower.device import Device, DeviceTraining
from fedglimpse.flower.server import Server


def says(size: float) -> Any:
    """Return a client whose own loop says that it has so many examples."""

    def train(model: nn.Module, settings: Any) -> dict[str, float]:
        return {"num-examples": size, "train_loss": 0.1}

    return client_app(nets.digits_mlp, train)


@pytest.mark.parametrize("method", ["fedavg", "glimpse"])
@pytest.mark.parametrize("size", [0, 0.3])
def test_an_update_of_no_examples_is_refused(method: str, size: float) -> None:
    served = small.serve(small.grid(app=says(size)), small.config(method, preset="tuned-1"))
    for record in served.records:
        assert record["selected"] == []
        assert set(record["failed"].values()) == {"no examples"}
        assert {str(c) for c in record["rejected"]} == record["failed"].keys()
    assert served.state.isfinite().all()


def test_one_without_examples_does_not_hold_up_the_others() -> None:
    grid = small.grid()
    grid.nodes[3].app = says(0)
    served = small.serve(grid, small.config(preset="tuned-1"))
    assert all(r["failed"] == {"3": "no examples"} for r in served.records)  # asked every round
    assert all(len(r["selected"]) == 2 for r in served.records)
    assert served.state.isfinite().all()


def test_data_that_is_gone_when_training_begins() -> None:
    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x, y = small.data(settings)
        return (x[:0], y[:0]) if "visit" in settings and settings["round"] >= 1 else (x, y)

    grid = small.grid(app=client_app(nets.digits_mlp, data=data))
    served = small.serve(grid, small.config("fedavg", selection__k=1))
    assert [len(r["selected"]) for r in served.records] == [1, 0, 0]
    assert served.state.isfinite().all()


class Filling:
    """Data of which one client has none before a round."""

    def __init__(self, client: int, until: int) -> None:
        self.client, self.until = client, until

    def __call__(self, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x, y = small.data(settings)
        late = settings.get("round", -1) < self.until
        return (x[:0], y[:0]) if late and int(settings["partition-id"]) == self.client else (x, y)


def greetings(node: FakeNode) -> int:
    return node.asked.count(wire.HELLO)


def test_a_device_that_comes_to_have_data_takes_part() -> None:
    grid = small.grid(app=client_app(nets.digits_mlp, data=Filling(2, 3)))
    served = small.serve(grid, small.config(rounds=6))
    assert [2 in r["visible"] for r in served.records] == [False] * 3 + [True] * 3
    assert all(r["failed"] == {} for r in served.records)
    assert grid.nodes[2].asked.count(wire.SKETCH) == 3
    assert greetings(grid.nodes[2]) == 4  # at the start, and once before rounds 1, 2 and 3
    assert greetings(grid.nodes[0]) == 1


def test_devices_without_data_do_not_count_as_visible() -> None:
    """A round with too few others waits, greets them once, and passes."""
    grid = small.grid(app=client_app(nets.digits_mlp, data=Filling(2, 99)))
    few = small.config(visibility__min_visible=small.CLIENTS)
    served = small.serve(grid, few)
    assert all(r["selected"] == [] and 2 not in r["visible"] for r in served.records)
    assert greetings(grid.nodes[2]) == few.rounds
    enough = small.config(visibility__min_visible=small.CLIENTS - 1)
    assert all(r["selected"] for r in small.serve(grid, enough).records)


def test_the_sizes_of_clients_without_data_are_no_measure_for_unknown_ones() -> None:
    roster = KnownClients(capacity=3, names=["a", "b"], sizes=[0, 0])
    assert roster.typical_sizes() == [0, 0, 1]
    roster.sizes = [0, 6]
    assert roster.typical_sizes() == [0, 6, 6]


def test_sizes_are_looked_up_a_few_times_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each client, which would be quadratic."""
    calls: list[int] = []
    genuine = KnownClients.typical_sizes
    monkeypatch.setattr(
        KnownClients, "typical_sizes", lambda self: calls.append(1) or genuine(self)
    )

    def lookups(clients: int) -> int:
        calls.clear()
        settings = small.config("fedavg", rounds=1, data__clients=clients)
        small.serve(small.grid(clients), settings)
        return len(calls)

    assert lookups(6) == lookups(3)


def test_data_gets_the_same_settings_at_hello_and_in_training() -> None:
    seen: list[dict[str, Any]] = []

    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        seen.append(dict(settings))
        return small.data(settings)

    grid = small.grid(app=client_app(nets.digits_mlp, data=data))
    user_settings = {"colour": "green"}
    Server(small.config("fedavg"), small.problem(), small.TERMS, None, user_settings).run(grid)
    hello, training = seen[0], seen[-1]
    apart = {"model", "needs", "after", "client", "visit"}  # about one piece of work
    assert hello.keys() == training.keys() - apart
    assert (hello["round"], hello["local.epochs"], hello["colour"]) == (0, 1, "green")


def test_a_hello_that_fails_says_why_when_the_run_cannot_start() -> None:
    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        raise FileNotFoundError("/home/anna/patients.csv")

    grid = small.grid()
    grid.nodes[1].app = client_app(nets.digits_mlp, data=data)
    with pytest.raises(UserError) as caught:
        small.serve(grid, small.config())
    assert caught.value.key == "terms.min_clients"
    why = f"Node {grid.nodes[1].node_id} did not say hello: failed: FileNotFoundError."
    assert str(caught.value).count(why) == 1


@pytest.mark.parametrize("here", ["bytes", "floats"])
@pytest.mark.parametrize("there", ["bytes", "floats"])
def test_proxy_images_mean_the_same_however_they_are_stored(here: str, there: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    state = Layout.of(model).read(model)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    own, proxy = images[:7], images[7:]
    expected = model(as_input(proxy)).softmax(1)
    own, proxy = own if here == "bytes" else own / 255, proxy if there == "bytes" else proxy / 255
    settings = {"classes": 4, **{f"sketch.{k}": v for k, v in vars(SketchConfig()).items()}}
    device = Device(model, settings, lambda settings: (own, torch.zeros(7).long()))
    done = DeviceTraining(state, state, {})
    said = device.trained(frozenset({"proxy_predictions"}), done, proxy)["proxy_predictions"]
    torch.testing.assert_close(said.view(5, 4), expected)
