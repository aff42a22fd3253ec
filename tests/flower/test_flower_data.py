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


def client_of_size(size: float) -> Any:
    """Return a client whose own training loop reports so many examples."""

    def train(model: nn.Module, settings: Any) -> dict[str, float]:
        return {"num-examples": size, "train_loss": 0.1}

    return client_app(nets.digits_mlp, train)


@pytest.mark.parametrize("method", ["fedavg", "glimpse"])
@pytest.mark.parametrize("size", [0, 0.3])
def test_an_update_of_no_examples_is_refused(method: str, size: float) -> None:
    served = small.serve(
        small.grid(app=client_of_size(size)), small.config(method, preset="tuned-1")
    )
    for record in served.records:
        assert record["selected"] == []
        assert set(record["failed"].values()) == {"no examples"}
        assert set(map(str, record["rejected"])) == record["failed"].keys()
    assert served.state.isfinite().all()


def test_a_client_without_examples_does_not_delay_the_others() -> None:
    grid = small.grid()
    grid.nodes[3].app = client_of_size(0)
    served = small.serve(grid, small.config(preset="tuned-1"))
    assert all(
        record["failed"] == {"3": "no examples"} for record in served.records
    )  # asked every round
    assert all(len(record["selected"]) == 2 for record in served.records)
    assert served.state.isfinite().all()


def test_data_may_disappear_before_training_begins() -> None:
    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x, y = small.data(settings)
        if "visit" in settings and settings["round"] >= 1:
            return x[:0], y[:0]
        return x, y

    grid = small.grid(app=client_app(nets.digits_mlp, data=data))
    served = small.serve(grid, small.config("fedavg", selection__k=1))
    assert [len(record["selected"]) for record in served.records] == [1, 0, 0]
    assert served.state.isfinite().all()


class LateData:
    """Data of which one client has none before a round."""

    def __init__(self, client: int, first_round: int) -> None:
        self.client = client
        self.first_round = first_round

    def __call__(self, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x, y = small.data(settings)
        is_early = settings.get("round", -1) < self.first_round
        if is_early and int(settings["partition-id"]) == self.client:
            return x[:0], y[:0]
        return x, y


def num_hellos(node: FakeNode) -> int:
    return node.asked.count(wire.HELLO)


def test_a_device_takes_part_once_it_has_data() -> None:
    grid = small.grid(app=client_app(nets.digits_mlp, data=LateData(2, 3)))
    served = small.serve(grid, small.config(rounds=6))
    assert [2 in record["visible"] for record in served.records] == [False] * 3 + [True] * 3
    assert all(record["failed"] == {} for record in served.records)
    assert grid.nodes[2].asked.count(wire.SKETCH) == 3
    assert num_hellos(grid.nodes[2]) == 4  # at the start, and once before rounds 1, 2 and 3
    assert num_hellos(grid.nodes[0]) == 1


def test_devices_without_data_do_not_count_as_visible() -> None:
    """A round with too few others waits, greets them once, and passes."""
    grid = small.grid(app=client_app(nets.digits_mlp, data=LateData(2, 99)))
    settings = small.config(visibility__min_visible=small.CLIENTS)
    served = small.serve(grid, settings)
    assert all(record["selected"] == [] and 2 not in record["visible"] for record in served.records)
    assert num_hellos(grid.nodes[2]) == settings.rounds
    settings = small.config(visibility__min_visible=small.CLIENTS - 1)
    served = small.serve(grid, settings)
    assert all(record["selected"] for record in served.records)


def test_clients_without_data_do_not_count_for_the_typical_size() -> None:
    clients = KnownClients(capacity=3, names=["a", "b"], sizes=[0, 0])
    assert clients.typical_sizes() == [0, 0, 1]
    clients.sizes = [0, 6]
    assert clients.typical_sizes() == [0, 6, 6]


def test_sizes_are_computed_a_few_times_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each client, which would be quadratic."""
    calls: list[KnownClients] = []
    typical_sizes = KnownClients.typical_sizes

    def counted(self: KnownClients) -> list[int]:
        calls.append(self)
        return typical_sizes(self)

    monkeypatch.setattr(KnownClients, "typical_sizes", counted)

    def num_calls(num_clients: int) -> int:
        calls.clear()
        settings = small.config("fedavg", rounds=1, data__clients=num_clients)
        small.serve(small.grid(num_clients), settings)
        return len(calls)

    assert num_calls(6) == num_calls(3)


def test_data_gets_the_same_settings_at_hello_and_in_training() -> None:
    received: list[dict[str, Any]] = []

    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        received.append(dict(settings))
        return small.data(settings)

    grid = small.grid(app=client_app(nets.digits_mlp, data=data))
    user_settings = {"colour": "green"}
    Server(small.config("fedavg"), small.problem(), small.TERMS, None, user_settings).run(grid)
    hello = received[0]
    training = received[-1]
    of_training = {"model", "needs", "after", "client", "visit"}
    assert hello.keys() == training.keys() - of_training
    assert (hello["round"], hello["local.epochs"], hello["colour"]) == (0, 1, "green")


def test_a_hello_that_fails_says_why_when_the_run_cannot_start() -> None:
    def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        raise FileNotFoundError("/home/anna/patients.csv")

    grid = small.grid()
    grid.nodes[1].app = client_app(nets.digits_mlp, data=data)
    with pytest.raises(UserError) as caught:
        small.serve(grid, small.config())
    assert caught.value.key == "terms.min_clients"
    reason = f"Node {grid.nodes[1].node_id} did not say hello: failed: FileNotFoundError."
    assert str(caught.value).count(reason) == 1


@pytest.mark.parametrize("client_kind", ["bytes", "floats"])
@pytest.mark.parametrize("server_kind", ["bytes", "floats"])
def test_proxy_images_mean_the_same_however_they_are_stored(
    client_kind: str, server_kind: str
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    state = Layout.of(model).read(model)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    local = images[:7]
    proxy = images[7:]
    expected = model(as_input(proxy)).softmax(1)
    if client_kind == "floats":
        local = local / 255
    if server_kind == "floats":
        proxy = proxy / 255
    settings: dict[str, Any] = {"classes": 4}
    for name, value in vars(SketchConfig()).items():
        settings[f"sketch.{name}"] = value
    device = Device(model, settings, lambda settings: (local, torch.zeros(7).long()))
    training = DeviceTraining(state, state, {})
    reports = device.trained(frozenset({"proxy_predictions"}), training, proxy)
    torch.testing.assert_close(reports["proxy_predictions"].view(5, 4), expected)
