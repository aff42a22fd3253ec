"""Identities of clients, what they can do, and what never leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedglimpse

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import small_federation as small
from fake_grid import FakeNode
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedglimpse.errors import UserError
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.flower import device
from fedglimpse.flower import messages as wire
from fedglimpse.flower.client import client_app
from fedglimpse.flower.clients import Arrival, KnownClients, identity, natural
from fedglimpse.flower.deployment import ServerTerms
from fedglimpse.flower.strategy import GlimpseStrategy, from_run_config
from fedglimpse.runs import build as builder
from mistakes import mistake


def test_a_restarted_client_keeps_its_identity_on_a_new_connection(tmp_path: Path) -> None:
    grid = small.grid()
    first = small.serve(grid, small.config(rounds=2), tmp_path / "a")
    old = grid.nodes[4]
    grid.nodes[4] = FakeNode(5, old.app, old.config, "")  # another node id, the same client
    grid.nodes.append(old)  # still listed for a while, as a dead node is
    old.fault = lambda message: "silent"
    second = small.serve(grid, small.config(rounds=2), terms=ServerTerms(hello_timeout=1))
    assert second.names == first.names == [f"declared:{i}" for i in range(small.CLIENTS)]
    assert all(4 in record["visible"] and "4" not in record["failed"] for record in second.records)


def test_a_registered_name_comes_before_a_declared_one() -> None:
    names = [identity("site-1", "x", 7), identity("", "site-1", 7), identity("", "", 7)]
    assert names == ["name:site-1", "declared:site-1", "node:7"]  # nobody can pose as another
    served = small.serve(small.grid(names=True), small.config(rounds=1))
    assert served.names == [f"name:site-{i}" for i in range(small.CLIENTS)]


def test_clients_get_dense_ids_until_the_capacity_is_reached() -> None:
    assert sorted(["site-10", "site-2"], key=natural) == ["site-2", "site-10"]
    clients = KnownClients(capacity=3)
    assert clients.admit([Arrival(50, "b", 4), Arrival(60, "a", -1)]) == []
    assert clients.admit([Arrival(70, "A", 6), Arrival(51, "b", 8)]) == []
    assert (clients.names, clients.nodes[1]) == (["a", "b", "A"], 51)
    assert clients.typical_sizes() == [7, 8, 6]  # the mean of the known stands for the unknown
    assert [arrival.name for arrival in clients.admit([Arrival(80, "c", 1)])] == ["c"]
    copy = KnownClients(capacity=3)
    copy.load_state_dict(clients.state_dict())
    assert (copy.names, copy.sizes, copy.nodes) == (clients.names, clients.sizes, {})


def test_one_client_too_many_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    served = small.serve(small.grid(), small.config(rounds=1, data__clients=4))
    assert served.records[0]["visible"] == [0, 1, 2, 3]
    assert "one more than data.clients=4" in caplog.text


def test_another_version_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = small.grid()
    genuine = grid.nodes[1].answer

    def older(message: Message) -> Message:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "VERSION", "0.0.7")
            return genuine(message)

    grid.nodes[1].answer = older  # type: ignore[method-assign]
    with pytest.raises(UserError) as caught:
        small.serve(grid, small.config())
    sentence = "Client 'declared:1' runs fedglimpse 0.0.7, but here it is"
    assert str(caught.value).count(sentence) == 1
    assert caplog.text.count(sentence) == 1
    terms = ServerTerms(min_clients=5)
    served = small.serve(grid, small.config(), terms=terms)
    assert all(len(record["visible"]) == 5 for record in served.records)
    assert set(grid.nodes[1].asked) == {wire.HELLO}


def test_a_client_that_cannot_serve_the_method_is_left_out_with_a_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(model: Any, settings: Any) -> dict[str, float]:
        return {"num-examples": 3}

    grid = small.grid()
    grid.nodes[0].app = client_app(nets.digits_mlp, train)
    terms = ServerTerms(min_clients=5)
    served = small.serve(grid, small.config("power-of-choice", rounds=2), terms=terms)
    assert all(0 not in record["visible"] for record in served.records)
    assert caplog.text.count("cannot serve loss, which the method needs") == 1
    served = small.serve(grid, small.config("fedprox", rounds=1), terms=terms)
    assert 0 not in served.records[0]["visible"]
    assert "cannot serve proximal" in caplog.text
    with mistake():
        client_app(nets.digits_mlp)


def test_nothing_of_an_exception_but_its_class_leaves_the_client() -> None:
    secret = "/home/anna/patients.csv"

    def train(model: Any, settings: Any) -> dict[str, float]:
        raise FileNotFoundError(secret)

    grid = small.grid()
    node = grid.nodes[0]
    node.app = client_app(nets.digits_mlp, train)
    sent: list[Message] = []
    answer = node.answer

    def watched(message: Message) -> Message:
        sent.append(answer(message))
        return sent[-1]

    node.answer = watched  # type: ignore[method-assign]
    served = small.serve(grid, small.config(preset="tuned-1"))
    assert served.records[0]["failed"] == {"0": "failed: FileNotFoundError"}
    assert len(sent) == 4  # hello and three rounds
    assert not any(secret in str(m.content) or m.has_error() for m in sent)


@pytest.mark.parametrize(
    ("preset", "numbers", "arrays"),
    [
        ("tuned", {"num-examples", "train_loss", "update_norm", "loss"}, set()),
        ("tuned-1", {"num-examples", "train_loss"}, {"delta_sketch"}),
    ],
)
def test_a_client_sends_what_was_asked_for_and_no_more(
    preset: str, numbers: set[str], arrays: set[str]
) -> None:
    def train(model: Any, settings: Any) -> dict[str, float]:
        return {"num-examples": 3, "train_loss": 0.5, "label-7": 3.0}

    grid = small.grid(app=client_app(nets.digits_mlp, train, data=small.data))
    replies: list[Message] = []
    for node in grid.nodes:
        genuine = node.answer
        node.answer = lambda m, genuine=genuine: replies.append(genuine(m)) or replies[-1]  # type: ignore[method-assign, misc]
    small.serve(grid, small.config(preset=preset, rounds=1))
    trained = [r.content for r in replies if r.metadata.message_type == wire.SKETCH]
    assert len(trained) == small.CLIENTS
    for content in trained:
        assert set(content.metric_records["metrics"]) == numbers
        assert set(content.array_records["arrays"]) == arrays


def test_another_model_is_noticed() -> None:
    grid = small.grid()
    grid.nodes[2].app = client_app(lambda: nets.digits_mlp("group"), data=small.data)
    served = small.serve(grid, small.config(rounds=1))
    assert served.records[0]["failed"] == {"2": "another model"}


@pytest.mark.parametrize("kind", ["gaussian", "count"])
@pytest.mark.parametrize("parameters", ["head", "all"])
def test_a_device_sketches_like_the_simulator(kind: str, parameters: str) -> None:
    settings = small.config(sketch__kind=kind, sketch__parameters=parameters)
    for model in (nets.digits_mlp(), nets.fashion_cnn()):
        layout = Layout.of(model)
        row = layout.read(model)[: layout.num_params]
        simulated = builder.sketch_of(settings, layout)(row[None])[0]
        on_device = device._sketch(layout, settings.sketch)(row)
        torch.testing.assert_close(on_device, simulated)


def test_a_strategy_starts_like_any_other_of_flower(tmp_path: Path) -> None:
    start = nets.digits_mlp()
    strategy = GlimpseStrategy(small.config(), small.problem(), small.TERMS, tmp_path / "r")
    arrays = ArrayRecord(start.state_dict())
    user_settings = ConfigRecord({"colour": "green"})
    result = strategy.start(
        grid=small.grid(),
        initial_arrays=arrays,
        num_rounds=2,
        timeout=60,
        train_config=user_settings,
    )
    end = nets.digits_mlp()
    end.load_state_dict(result.arrays.to_torch_state_dict())
    assert not torch.equal(Layout.of(end).read(end), Layout.of(start).read(start))
    assert set(result.evaluate_metrics_serverapp) == {1, 2}
    assert strategy.finished is not None
    assert len(strategy.finished.records) == 2
    with mistake():
        strategy.aggregate_train(1, [])


def test_a_run_configuration_is_read_and_checked() -> None:
    values = {"seed": 3, "out": "~/r", "fedglimpse.rounds": 7, "terms.quorum": 0.25}
    config, terms, out = from_run_config(values)
    assert (config.seeds, config.rounds, terms.quorum, out) == ((3,), 7, 0.25, Path.home() / "r")
    assert from_run_config({"out": ""})[2] is None
    with mistake("seeds"):
        small.serve(small.grid(), small.config(seeds=[0, 1]))


def test_the_rest_of_the_library_does_not_know_flower() -> None:
    source = Path(fedglimpse.__file__).parent
    for path in source.rglob("*.py"):
        if "flower" not in path.relative_to(source).parts[0]:
            text = path.read_text()
            assert "import flwr" not in text, path
            assert "from flwr" not in text, path
