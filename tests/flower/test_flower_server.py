"""The server's loop with clients in memory: whom it asks, chooses, replaces and remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import small_federation as small
from fake_grid import FakeGrid, FakeNode
from flwr.app import Array, Message
from run_folder_schema import check_run_folder

from fedglimpse.agent.policy import write_policy
from fedglimpse.federation import models as nets
from fedglimpse.flower import messages as wire
from fedglimpse.flower.client import client_app
from fedglimpse.flower.deployment import ServerTerms
from fedglimpse.flower.round import DeviceRound
from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe
from fedglimpse.runs import experiment
from fedglimpse.runs.pretrain import teach
from mistakes import mistake

DEVICES_ONLY = {"failed", "received_bytes_chosen", "received_bytes_others", "seconds"}


def shared(record: dict[str, Any]) -> dict[str, Any]:
    return without(record, DEVICES_ONLY)


def without(record: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


@pytest.mark.parametrize("name", registry.MODULES)
def test_every_method_does_what_it_does_in_the_simulator(name: str) -> None:
    visibility = {"visibility__kind": "mobile", "visibility__cluster_size": 3}
    settings = small.config(name, rounds=2, **visibility)
    if describe(registry.info(name)).oracle:
        with mistake("method"):
            small.serve(FakeGrid([]), settings)
        return
    simulated = experiment.run(settings)
    served = small.serve(small.grid(), settings)
    for on_devices, in_simulator in zip(served.records, simulated.records, strict=True):
        for key, expected in shared(in_simulator).items():
            value = on_devices[key]
            if isinstance(expected, str | dict | None):
                assert value == expected, key
            else:
                torch.testing.assert_close(
                    torch.tensor(value), torch.tensor(expected), rtol=1e-4, atol=1e-5, msg=key
                )
        assert on_devices["failed"] == {}
    torch.testing.assert_close(served.state, simulated.world.states[0], rtol=1e-5, atol=1e-6)


def test_only_the_chosen_upload_and_one_phase_methods_train_only_the_chosen() -> None:
    grid = small.grid()
    small.serve(grid, small.config("glimpse"))
    kinds = [kind for kind, _ in grid.log]
    assert kinds.count(wire.SKETCH) == 3 * small.CLIENTS
    assert kinds.count(wire.UPLOAD) == 3 * 2
    assert wire.UPDATE not in kinds
    grid = small.grid()
    small.serve(grid, small.config("fedavg"))
    kinds = [kind for kind, _ in grid.log]
    assert kinds.count(wire.UPDATE) == 3 * 2
    assert {wire.SKETCH, wire.UPLOAD}.isdisjoint(kinds)
    assert kinds.count(wire.HELLO) == small.CLIENTS


def test_the_run_folder_is_that_of_a_simulated_run(tmp_path: Path) -> None:
    small.serve(small.grid(), small.config(), tmp_path / "r")
    check_run_folder(tmp_path / "r")


def corrupted(change: Any, kind: str = wire.UPLOAD) -> Any:
    """Return a fault that changes the uploaded state."""

    def fault(node: FakeNode, message: Message) -> Message | None:
        if message.metadata.message_type != kind:
            return None
        reply = node.answer(message)
        arrays = reply.content.array_records["arrays"]
        arrays["state"] = change(arrays["state"].numpy().copy())
        return reply

    return fault


def filled(state: np.ndarray) -> Array:
    state[7] = np.nan
    return Array(state)


BAD = {
    "not finite": filled,
    "wrong shape": lambda state: Array(state[:-1]),
    "oversized": lambda state: Array(np.concatenate([state, state])),
    "unreadable": lambda state: Array("float32", state.shape, "numpy.ndarray", b"\x80\x04pickle"),
    "float64": lambda state: Array(state.astype(np.float64)[: len(state) // 2]),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_update_is_refused_recorded_and_replaced_by_the_next_best(problem: str) -> None:
    settings = small.config(small.LARGEST, rounds=1)
    best, second = small.serve(small.grid(), settings).records[0]["selected"]
    grid = small.grid()
    bad = grid.nodes[best]
    bad.fault = lambda message: corrupted(BAD[problem])(bad, message)
    served = small.serve(grid, settings)
    record = served.records[0]
    assert record["rejected"] == [best]
    assert problem in record["failed"][str(best)]
    ranking = norms_in_order()
    assert record["selected"] == [ranking[2], second]  # the third best takes the first's place
    assert served.state.isfinite().all()


def norms_in_order() -> list[int]:
    """Return all clients, those that moved furthest first."""
    settings = small.config(small.LARGEST, rounds=1, selection__k=small.CLIENTS)
    return list(small.serve(small.grid(), settings).records[0]["selected"])


def test_a_reported_nan_is_refused_before_the_choice() -> None:
    def blown_up(model: torch.nn.Module, settings: Any) -> dict[str, float]:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return {"num-examples": 5, "train_loss": 1.0}

    grid = small.grid()
    grid.nodes[3].app = client_app(nets.digits_mlp, blown_up)
    served = small.serve(grid, small.config(preset="tuned-1"))
    assert all(record["rejected"] == [3] for record in served.records)
    assert all(
        3 not in record["selected"] and len(record["selected"]) == 2 for record in served.records
    )
    assert served.state.isfinite().all()


def test_a_client_that_lost_its_memory_between_the_phases_is_replaced() -> None:
    grid = small.grid()
    settings = small.config(small.LARGEST, rounds=1)
    ranking = norms_in_order()
    node = grid.nodes[ranking[0]]

    def restart(message: Message) -> None:
        if message.metadata.message_type == wire.UPLOAD:
            node.forget()

    node.fault = restart
    record = small.serve(grid, settings).records[0]
    assert record["selected"] == [ranking[2], ranking[1]]
    assert record["failed"] == {str(ranking[0]): "stale"}
    assert record["rejected"] == []


def test_the_agent_learns_from_the_substitutes() -> None:
    """After a failed upload, the agent must not learn as if the failed client had been used."""
    grid = small.grid()
    for node in grid.nodes[:4]:
        node.fault = lambda message: 5 if message.metadata.message_type == wire.UPLOAD else None
    served = small.serve(grid, small.config("glimpse", rounds=4))
    assert all(
        set(record["selected"]) <= {4, 5} and record["selected"] for record in served.records
    )


def test_a_silent_node_gets_no_new_work_until_it_has_answered() -> None:
    grid = small.grid()
    mute = grid.nodes[2]

    def silent(message: Message) -> str | None:
        return "silent" if message.metadata.message_type == wire.SKETCH else None

    mute.fault = silent
    terms = ServerTerms(train_timeout=10, patience=1000)
    served = small.serve(grid, small.config(), terms=terms)
    assert mute.asked == [wire.HELLO, wire.SKETCH]
    assert served.records[0]["failed"] == {"2": "no answer"}
    assert [2 in record["visible"] for record in served.records] == [True, False, False]

    grid = small.grid()
    mute = grid.nodes[2]

    def late(message: Message) -> str | None:
        """Answer the first training only when the second round begins."""
        if message.metadata.message_type != wire.SKETCH or len(mute.asked) > 2:
            return None
        grid.late = message  # type: ignore[attr-defined]
        return "silent"

    mute.fault = late
    listed = grid.get_nodes

    def nodes() -> list[Any]:
        message = getattr(grid, "late", None)
        if message is not None and grid.now >= 10:
            grid.replies[message.metadata.message_id] = mute.answer(message)
        return listed()

    grid.get_nodes = nodes  # type: ignore[method-assign]
    served = small.serve(grid, small.config(), terms=terms)
    assert [2 in record["visible"] for record in served.records] == [True, True, True]
    assert "2" not in served.records[1]["failed"]


def test_a_node_that_restarts_owes_nothing_any_more() -> None:
    grid = small.grid()
    node = grid.nodes[2]

    def restart(message: Message) -> str | None:
        """Restart at the first training, which is lost."""
        if message.metadata.message_type != wire.SKETCH or node.last_activated_at == "1":
            return None
        node.forget()
        node.last_activated_at = "1"
        return "silent"

    node.fault = restart
    terms = ServerTerms(train_timeout=10, patience=1000)
    served = small.serve(grid, small.config(), terms=terms)
    assert [record["failed"] for record in served.records] == [{"2": "no answer"}, {}, {}]
    assert all(2 in record["visible"] for record in served.records)
    assert node.asked[:4] == [wire.HELLO, wire.SKETCH, wire.HELLO, wire.SKETCH]


def test_too_few_answers_let_a_round_pass() -> None:
    grid = small.grid()
    for node in grid.nodes[:4]:
        node.fault = lambda message: 8 if message.metadata.message_type == wire.SKETCH else None
    start = small.serve(small.grid(), small.config("fedavg", rounds=1), terms=small.TERMS)
    assert start.records[0]["selected"]
    served = small.serve(grid, small.config())
    assert all(record["selected"] == [] and len(record["failed"]) == 4 for record in served.records)
    assert served.records[0]["accuracy"] == served.records[-1]["accuracy"]
    small_quorum = ServerTerms(quorum=0.2)
    served = small.serve(grid, small.config(), terms=small_quorum)
    assert all(record["selected"] for record in served.records)


def test_a_killed_server_resumes_with_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small.config("glimpse", rounds=6)
    uninterrupted = small.serve(small.grid(), settings)
    run_round = DeviceRound.run

    def killed(self: DeviceRound) -> Any:
        if self.round_num == 4:
            raise KeyboardInterrupt
        return run_round(self)

    monkeypatch.setattr(DeviceRound, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid(), settings, tmp_path / "r")
    monkeypatch.setattr(DeviceRound, "run", run_round)
    resumed = small.serve(small.grid(), settings, tmp_path / "r")
    for record, expected in zip(resumed.records, uninterrupted.records, strict=True):
        assert without(record, {"seconds"}) == without(expected, {"seconds"})
    assert torch.equal(resumed.state, uninterrupted.state)
    check_run_folder(tmp_path / "r")


def test_a_policy_of_the_simulator_is_served_frozen(tmp_path: Path) -> None:
    policy = str(tmp_path / "policy.pt")
    experiment.run(small.config("glimpse", rounds=6, agent__save=policy))
    settings = small.config("glimpse", agent__load=policy, agent__frozen=True)
    simulated = experiment.run(settings)
    served = small.serve(small.grid(), settings)
    for on_devices, in_simulator in zip(served.records, simulated.records, strict=True):
        assert on_devices["selected"] == in_simulator["selected"]
        assert on_devices["q"] == pytest.approx(in_simulator["q"], abs=1e-3)
        assert on_devices["epsilon"] == 0
        assert "td_loss" not in on_devices
    learning = small.serve(
        small.grid(), small.config("glimpse", rounds=12, agent__load=policy, agent__save=policy)
    )
    assert "td_loss" in learning.records[-1]


def test_a_pretrained_policy_is_served(tmp_path: Path) -> None:
    pretrained = teach([small.config("glimpse", rounds=12, seeds=[1, 2])], lessons=5)
    policy = str(write_policy(pretrained.policy, str(tmp_path / "policy.pt")))
    settings = small.config("glimpse", agent__load=policy, agent__frozen=True)
    simulated = experiment.run(settings)
    served = small.serve(small.grid(), settings)
    for on_devices, in_simulator in zip(served.records, simulated.records, strict=True):
        assert on_devices["selected"] == in_simulator["selected"]
        assert on_devices["q"] == pytest.approx(in_simulator["q"], abs=1e-3)
