"""Trackers get the metrics of the records, also after a run was stopped and resumed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.config.loading import resolve
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.runs.trackers import LiveLog, Source, metrics_of
from mistakes import mistake

SMALL: dict[str, Any] = {"method": "fedavg", "rounds": 5, "seeds": [3, 4], "checkpoint.every": 2}


def test_only_finite_numbers_are_passed_on() -> None:
    record = {
        "lane": 0, "seed": 3, "round": 7, "accuracy": 0.5, "loss": math.nan, "oracle": True,
        "behaviour": "greedy", "q": [1.0], "reward": None, "uplink_bytes": 12,
    }  # fmt: skip
    assert metrics_of(record) == {"accuracy": 0.5, "uplink_bytes": 12.0}


class Notebook:
    """A sink that writes down every call."""

    pages: list[Any] = []  # noqa: RUF012

    def __init__(self, source: Source) -> None:
        self.seed = source.seed
        self.pages.append(("open", source.seed, source.done))

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        self.pages.append((self.seed, round_num, metrics["accuracy"]))

    def close(self, finished: bool) -> None:
        self.pages.append(("close", self.seed, finished))


class Broken(Notebook):
    """Fails in round 1."""

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        if round_num == 1:
            raise ConnectionError("nobody listens")
        super().write(round_num, metrics)


def unreachable(source: Source) -> Notebook:
    raise ConnectionError("nobody answers\nat all")


@pytest.fixture(autouse=True)
def _empty() -> None:
    Notebook.pages.clear()


def test_a_custom_sink_sees_every_round_of_every_seed(tmp_path: Path) -> None:
    result = run({**SMALL, "log.own": "test_live:Notebook"}, tmp_path / "o")
    written = [page for page in Notebook.pages if page[0] in (3, 4)]
    assert sorted(written) == sorted((r["seed"], r["round"], r["accuracy"]) for r in result.records)
    assert Notebook.pages[:2] == [("open", 3, 0), ("open", 4, 0)]
    assert Notebook.pages[-2:] == [("close", 3, True), ("close", 4, True)]


def test_a_stopped_run_closes_its_sinks_and_opens_them_on_resuming(tmp_path: Path) -> None:
    config = {**SMALL, "log.own": "test_live:Notebook"}
    stop_after(3, config, tmp_path / "o")
    assert Notebook.pages[-1] == ("close", 4, False)
    Notebook.pages.clear()
    run(config, tmp_path / "o", resume=True)
    assert Notebook.pages[0] == ("open", 3, 3)
    assert [page[1] for page in Notebook.pages if page[0] == 4] == [3, 4]


def test_a_tracker_keeps_its_id_when_a_run_is_resumed(tmp_path: Path) -> None:
    ids = iter("abc")
    for done, expected in ((0, "a"), (2, "a"), (0, "b")):
        source = Source(resolve(SMALL), 3, tmp_path, done)
        assert source.tracker_id("mine", lambda: next(ids)) == expected
    assert Source(resolve(SMALL), 4, tmp_path, 2).tracker_id("mine", lambda: next(ids)) == "c"


def test_a_sink_that_fails_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run({**SMALL, "log.own": "test_live:Broken"}, tmp_path / "o")
    assert len(result.records) == 10
    assert capsys.readouterr().err.count("nobody listens") == 2
    assert [page[1] for page in Notebook.pages if page[0] == 3] == [0]


def test_a_sink_that_does_not_open_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = LiveLog(resolve({}), None)
    log.openers = [unreachable]
    log.begin("fedavg", 0, 2)
    log.round([{"seed": 0, "round": 0, "accuracy": 0.5}])
    log.end()
    assert capsys.readouterr().err.strip().endswith("ConnectionError: nobody answers")


def test_logging_changes_no_result_and_may_change_on_resume(tmp_path: Path) -> None:
    plain = run(SMALL)
    stop_after(2, SMALL, tmp_path / "o")
    logged = run({**SMALL, "log.own": "test_live:Notebook"}, tmp_path / "o", resume=True)
    assert timeless(logged.records) == timeless(plain.records)


def test_a_missing_tool_is_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with mistake("log.tensorboard"):
        run({**SMALL, "log.tensorboard": True}, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_event_files_need_a_folder() -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    with mistake("log.tensorboard"):
        run({**SMALL, "log.tensorboard": True})


def test_tensorboard_event_files_hold_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {**SMALL, "log.tensorboard": True}
    stop_after(3, config, tmp_path / "o")
    result = run(config, tmp_path / "o", resume=True)
    for seed in (3, 4):
        events = EventAccumulator(str(tmp_path / "o" / "tensorboard" / f"seed-{seed}"))
        events.Reload()
        own_sink = [r for r in result.records if r["seed"] == seed]
        for name in ("accuracy", "train_loss", "uplink_bytes", "server_flops"):
            points = [(e.step, e.value) for e in events.Scalars(name)]
            assert points == [(r["round"], pytest.approx(r[name])) for r in own_sink]


def stop_after(rounds: int, config: Mapping[str, Any], out: Path) -> None:
    rounds_left = iter(range(rounds - 1, -1, -1))
    with pytest.raises(Stopped):
        run(config, out, should_stop=lambda: next(rounds_left) == 0)


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**r, "seconds": 0} for r in records]
