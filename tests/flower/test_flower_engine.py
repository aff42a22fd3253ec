"""The server's loop against clients in memory: who is asked, chosen, replaced, remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import flower_small as small
from flower_grid import FakeGrid, FakeNode
from flower_schema import check_run_folder
from flwr.app import Array, Message

from fedglimpse.agent.policy import write_policy
from fedglimpse.federation import models as nets
from fedglimpse.flower import messages as wire
from fedglimpse.flower import server as engine
from fedglimpse.flower.client import client_app
from fedglimpse.flower.round import DeviceRound
from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe
from fedglimpse.runs import experiment
from fedglimpse.runs.pretrain import teach
from mistakes import mistake

DEVICES_ONLY = {"failed", "received_bytes_chosen", "received_bytes_others", "seconds"}


def shared(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in DEVICES_ONLY}


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
    for ours, theirs in zip(served.records, simulated.records, strict=True):
        for key, value in shared(theirs).items():
            if isinstance(value, str | dict | None):
                assert ours[key] == value, key
            else:
                here, there = torch.tensor(ours[key]), torch.tensor(value)
                torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, msg=key)
        assert ours["failed"] == {}
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


def test_a_run_folder_is_a_run_folder(tmp_path: Path) -> None:
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
    assert all(r["rejected"] == [3] for r in served.records)
    assert all(3 not in r["selected"] and len(r["selected"]) == 2 for r in served.records)
    assert served.state.isfinite().all()


def test_a_client_that_lost_its_memory_between_the_phases_is_replaced() -> None:
    grid, settings = small.grid(), small.config(small.LARGEST, rounds=1)
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


def test_the_agent_learns_from_those_who_replaced() -> None:
    """A failed upload must not teach the agent that the failed client was used."""
    grid = small.grid()
    for node in grid.nodes[:4]:
        node.fault = lambda message: 5 if message.metadata.message_type == wire.UPLOAD else None
    served = small.serve(grid, small.config("glimpse", rounds=4))
    assert all(set(r["selected"]) <= {4, 5} and r["selected"] for r in served.records)


def test_a_silent_node_gets_no_new_work_until_it_has_answered() -> None:
    grid = small.grid()
    mute, held = grid.nodes[2], []

    def silent(message: Message) -> str | None:
        if message.metadata.message_type == wire.SKETCH:
            held.append(message)
            return "silent"
        return None

    mute.fault = silent
    terms = engine.ServerTerms(train_timeout=10, patience=1000)
    served = small.serve(grid, small.config(), terms=terms)
    assert mute.asked == [wire.HELLO, wire.SKETCH]
    assert served.records[0]["failed"] == {"2": "no answer"}
    assert [2 in r["visible"] for r in served.records] == [True, False, False]

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
    assert [2 in r["visible"] for r in served.records] == [True, True, True]
    assert "2" not in served.records[1]["failed"]


def test_a_node_that_restarts_owes_nothing_any_more() -> None:
    grid = small.grid()
    node = grid.nodes[2]

    def restart(message: Message) -> str | None:
        """Take the first training to the grave."""
        if message.metadata.message_type != wire.SKETCH or node.last_activated_at == "1":
            return None
        node.forget()
        node.last_activated_at = "1"
        return "silent"

    node.fault = restart
    terms = engine.ServerTerms(train_timeout=10, patience=1000)
    served = small.serve(grid, small.config(), terms=terms)
    assert [r["failed"] for r in served.records] == [{"2": "no answer"}, {}, {}]
    assert all(2 in r["visible"] for r in served.records)
    assert node.asked[:4] == [wire.HELLO, wire.SKETCH, wire.HELLO, wire.SKETCH]


def test_too_few_answers_let_a_round_pass() -> None:
    grid = small.grid()
    for node in grid.nodes[:4]:
        node.fault = lambda message: 8 if message.metadata.message_type == wire.SKETCH else None
    start = small.serve(small.grid(), small.config("fedavg", rounds=1), terms=small.TERMS)
    assert start.records[0]["selected"]
    served = small.serve(grid, small.config())
    assert all(r["selected"] == [] and len(r["failed"]) == 4 for r in served.records)
    assert served.records[0]["accuracy"] == served.records[-1]["accuracy"]
    lax = engine.ServerTerms(quorum=0.2)
    assert all(r["selected"] for r in small.serve(grid, small.config(), terms=lax).records)


def test_a_killed_server_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small.config("glimpse", rounds=6)
    whole = small.serve(small.grid(), settings)
    play = DeviceRound.run

    def killed(self: DeviceRound) -> Any:
        if self.round_num == 4:
            raise KeyboardInterrupt
        return play(self)

    monkeypatch.setattr(DeviceRound, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid(), settings, tmp_path / "r")
    monkeypatch.setattr(DeviceRound, "run", play)
    resumed = small.serve(small.grid(), settings, tmp_path / "r")
    drop = {"seconds"}
    assert [{k: v for k, v in r.items() if k not in drop} for r in resumed.records] == [
        {k: v for k, v in r.items() if k not in drop} for r in whole.records
    ]
    assert torch.equal(resumed.state, whole.state)
    check_run_folder(tmp_path / "r")


def test_a_policy_of_the_simulator_is_served_frozen(tmp_path: Path) -> None:
    policy = str(tmp_path / "policy.pt")
    experiment.run(small.config("glimpse", rounds=6, agent__save=policy))
    settings = small.config("glimpse", agent__load=policy, agent__frozen=True)
    simulated, served = experiment.run(settings), small.serve(small.grid(), settings)
    for ours, theirs in zip(served.records, simulated.records, strict=True):
        assert ours["selected"] == theirs["selected"]
        assert ours["q"] == pytest.approx(theirs["q"], abs=1e-3)
        assert ours["epsilon"] == 0
        assert "td_loss" not in ours
    learning = small.serve(
        small.grid(), small.config("glimpse", rounds=12, agent__load=policy, agent__save=policy)
    )
    assert "td_loss" in learning.records[-1]


def test_a_policy_that_others_taught_is_served(tmp_path: Path) -> None:
    taught = teach([small.config("glimpse", rounds=12, seeds=[1, 2])], lessons=5)
    policy = str(write_policy(taught.policy, str(tmp_path / "policy.pt")))
    settings = small.config("glimpse", agent__load=policy, agent__frozen=True)
    simulated, served = experiment.run(settings), small.serve(small.grid(), settings)
    for ours, theirs in zip(served.records, simulated.records, strict=True):
        assert ours["selected"] == theirs["selected"]
        assert ours["q"] == pytest.approx(theirs["q"], abs=1e-3)
