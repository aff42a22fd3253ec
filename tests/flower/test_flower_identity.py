"""One device is one client, whatever it calls itself and however often it connects."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import small_federation as small
from fake_grid import FakeGrid, FakeNode

from fedglimpse.errors import UserError
from fedglimpse.flower import messages as wire
from fedglimpse.flower.clients import Arrival, KnownClients, natural
from fedglimpse.flower.deployment import ServerTerms
from fedglimpse.flower.round import DeviceRound


def after_round_0(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Call `action` after the first round."""
    run_round = DeviceRound.run

    def hooked(self: DeviceRound) -> Any:
        metrics = run_round(self)
        if self.round_num == 0:
            action()
        return metrics

    monkeypatch.setattr(DeviceRound, "run", hooked)


def renamed(node: FakeNode, name: str) -> None:
    """Restart a node with another client-id; with a key it keeps its node id."""
    node.config = {**node.config, "client-id": name}
    node.forget()
    node.last_activated_at = "1"


@pytest.mark.parametrize("method", ["fedavg", "glimpse"])
def test_a_device_with_a_new_name_is_not_counted_twice(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = small.grid()
    after_round_0(monkeypatch, lambda: renamed(grid.nodes[0], "renamed"))
    settings = small.config(method, data__clients=7, selection__k=7)
    served = small.serve(grid, settings, terms=ServerTerms(min_clients=6))
    assert served.names[-1] == "declared:renamed"
    visible = [record["visible"] for record in served.records]
    assert visible == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert all(record["failed"] == {} for record in served.records)
    kind = wire.UPDATE if method == "fedavg" else wire.SKETCH
    assert grid.nodes[0].asked.count(kind) == 3


def test_a_renamed_device_is_refused_where_the_capacity_is_reached() -> None:
    clients = KnownClients(capacity=1)
    clients.admit([Arrival(50, "a", 4)])
    assert [arrival.name for arrival in clients.admit([Arrival(50, "b", 4)])] == ["b"]
    assert clients.nodes == {}
    assert clients.admit([Arrival(50, "a", 4)]) == []  # and returns with the old name
    assert clients.nodes == {0: 50}


@pytest.mark.parametrize("name", ["hall-5²", "½", "①", "site-٣", "", "9" * 100])
def test_any_name_can_be_declared(name: str) -> None:
    assert natural(name) is not None
    grid = small.grid(2)
    grid.nodes[1].config = {"partition-id": 1, "client-id": name}
    grid.nodes[1].forget()
    served = small.serve(grid, small.config("fedavg", rounds=1, data__clients=2))
    assert sorted(served.records[0]["selected"]) == [0, 1]


def twins(count: int) -> FakeGrid:
    """Return a grid of live devices that all say they are the same client."""
    grid = small.grid(count)
    for node in grid.nodes:
        node.config = {"partition-id": 0}
        node.forget()
    return grid


def test_two_devices_with_one_name_are_both_named_in_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = twins(2)
    first, second = (node.node_id for node in grid.nodes)
    sentence = f"Nodes {first} and {second} both say that they are 'declared:0'"
    with pytest.raises(UserError) as caught:
        small.serve(grid, small.config("fedavg", data__clients=2))
    assert caught.value.key == "terms.min_clients"
    assert str(caught.value).count(sentence) == 1
    assert "give each its own client-id" in str(caught.value)
    assert caplog.text.count(sentence) == 1
    terms = ServerTerms(min_clients=1)
    served = small.serve(grid, small.config("fedavg", data__clients=2), terms=terms)
    assert all(record["selected"] == [0] for record in served.records)
    assert wire.UPDATE not in grid.nodes[0].asked


def test_a_later_device_with_the_same_name_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = small.grid()
    old = grid.nodes[4]
    after_round_0(
        monkeypatch, lambda: grid.nodes.append(FakeNode(5, old.app, dict(old.config), ""))
    )
    served = small.serve(grid, small.config("fedavg", selection__k=small.CLIENTS))
    assert caplog.text.count(f"Nodes {old.node_id} and 5 both say") == 1
    assert all(len(record["selected"]) == small.CLIENTS for record in served.records)
    assert old.asked.count(wire.UPDATE) == 1  # the newest connection counts


def test_a_device_that_reconnects_is_not_a_second_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = small.grid()

    def reconnect() -> None:
        old = grid.nodes[4]
        grid.nodes[4] = FakeNode(5, old.app, old.config, "")

    after_round_0(monkeypatch, reconnect)
    small.serve(grid, small.config("fedavg"))
    assert "both say" not in caplog.text


def test_devices_can_swap_their_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two devices whose client-ids were mixed up swap them."""
    grid = small.grid()

    def swap() -> None:
        renamed(grid.nodes[0], "1")
        renamed(grid.nodes[1], "0")

    after_round_0(monkeypatch, swap)
    served = small.serve(grid, small.config("fedavg", selection__k=small.CLIENTS))
    assert all(len(record["selected"]) == small.CLIENTS for record in served.records)
    assert [node.asked.count(wire.UPDATE) for node in grid.nodes] == [3] * small.CLIENTS
    assert "both say" not in caplog.text
