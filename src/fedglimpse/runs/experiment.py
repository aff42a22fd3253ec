"""Runs from start to end: build a world, run its rounds, write records, save, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fedglimpse.agent.policy import check_use, write_policy
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation.reports import PERMISSION
from fedglimpse.plugins import not_ended_by_own_code, users_fault
from fedglimpse.runs.build import build_world
from fedglimpse.runs.class_counts import store_class_counts
from fedglimpse.runs.folder import RunFolder, writing
from fedglimpse.runs.kept_models import save_models
from fedglimpse.runs.latecomers import latecomers
from fedglimpse.runs.progress import Listener, Silent
from fedglimpse.runs.rounds import positions_of, restore, selectors_of, snapshot
from fedglimpse.runs.saved_state import check_lane, check_round, fitting
from fedglimpse.runs.summary import summarise
from fedglimpse.runs.threads import threads_of_run, using_threads
from fedglimpse.runs.trackers import LiveLog
from fedglimpse.simulation.lane import RoundResults
from fedglimpse.simulation.plugin_checks import check_state
from fedglimpse.simulation.world import Lane, World
from fedglimpse.storage.checkpoint import settle


class Stopped(Exception):
    """The run was asked to stop; it ended after a finished round and can be resumed."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    summary: dict[str, Any]
    world: World
    path: Path | None
    in_memory: Sequence[dict[str, Any]] = ()  # records of a run without a folder

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """All records, read from the folder when they are first asked for."""
        return list(self.in_memory) if self.path is None else RunFolder(self.path).read()


@not_ended_by_own_code()
def run(
    config: Config | Mapping[str, Any],
    out: Path | str | None = None,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run a federation from start to end.

    Args:
        config: a `Config`, or a mapping of dotted keys such as `{"data.name": "digits"}`.
        out: the run folder; None keeps everything in memory.
        resume: continue the run in `out`, if there is one.
        listener: follows the rounds.
        should_stop: asked after every round; True ends the run with `Stopped`.

    Example:
        >>> result = run({"method": "fedavg-window", "rounds": 2, "seeds": [0, 1]})
        >>> len(result.records)
        4
    """
    if not isinstance(config, Config):
        config = resolve(config)
    pack = Pack([(config, None if out is None else Path(out))], listener or Silent())
    folder = pack.runs[0].folder
    with nullcontext() if folder is None else folder.alone():
        return pack.run(resume, should_stop)[0]


@not_ended_by_own_code()
def run_together(
    runs: Sequence[tuple[Config, Path | None]],
    *,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    cores: int | None = None,
) -> list[Result]:
    """Run several federations side by side: their clients train in the same batches.

    Each has its own folder, and gives the same records as alone up to floating-point tolerance.
    Keeping other processes out of the folders is the caller's part.

    Args:
        runs: configurations whose `build.together_key` is the same, with their run folders.
        resume: continue the runs that are in their folders.
        listener: follows the rounds of all of them.
        should_stop: asked after every round; True ends them with `Stopped`.
        cores: of a CPU that they may use; None: all that are available.
    """
    return Pack(runs, listener or Silent(), cores).run(resume, should_stop)


class Pack:
    """Runs that share a world; each has its own folder and records."""

    def __init__(
        self,
        runs: Sequence[tuple[Config, Path | None]],
        listener: Listener,
        cores: int | None = None,
    ) -> None:
        """Build what the runs share and find what is wrong with them; nothing is written.

        Args:
            runs: configurations and run folders.
            listener: follows the rounds.
            cores: of a CPU that the runs may use; None: all that are available.
        """
        for _, path in runs:
            if path is not None:
                RunFolder(path).check_simulated()
        self.listener = listener
        with using_threads(1):  # building is a chain of small operations
            self.world = build_world([config for config, _ in runs])
        self.threads = self._threads(runs, cores)
        self.selectors = selectors_of(self.world)
        self.runs: list[PackedRun] = []
        first = 0
        for config, path in runs:
            lanes = self.world.lanes[first : first + len(config.seeds)]
            first += len(config.seeds)
            check_policy(config, lanes)
            self.runs.append(PackedRun(config, path, self.world, lanes))
        self.unfinished = list(self.runs)
        self.learns_later = trains_in_background(self.world)
        self._last_time = 0.0  # when the last round was learnt from

    def _threads(self, runs: Sequence[tuple[Config, Path | None]], cores: int | None) -> int | None:
        """Return with how many threads the runs compute; None: on a GPU, as many as before."""
        if self.world.states.is_cuda:
            return None
        folders = [path for _, path in runs if path is not None]
        return threads_of_run(runs[0][0].engine, self.world.evaluator.model, folders, cores)

    def run(self, resume: bool, should_stop: Callable[[], bool]) -> list[Result]:
        """Open the folders, run all rounds, return the results."""
        folders = [run.folder for run in self.runs if run.folder is not None]
        with writing(folders[0].path) if folders else nullcontext():
            settle([folder.checkpoint for folder in folders])
        with ExitStack() as at_exit:
            at_exit.enter_context(using_threads(self.threads))
            for run in self.runs:
                at_exit.callback(run.live.end)
                run.open(resume)
            name = f"{len(self.runs)} runs"
            if len(self.runs) == 1:
                name = self.runs[0].config.method
            rounds_done = min(run.rounds_done for run in self.runs)
            rounds_total = max(run.config.rounds for run in self.runs)
            self.listener.begin(name, rounds_done, rounds_total)
            at_exit.callback(self.listener.end)
            try:
                self.run_rounds(should_stop)
            except Exception as error:
                if _is_fault_of_user_code(error):
                    for folder in folders:
                        folder.allow_code_change()
                raise
        return [run.result() for run in self.runs]

    def run_rounds(self, should_stop: Callable[[], bool]) -> None:
        """Run rounds until every run has all of its own; a finished run leaves the world."""
        world = self.world
        previous: RoundResults | None = None  # of the last round, if nobody has learnt from it
        self.finish_runs()
        self._last_time = time.perf_counter()
        while self.unfinished:
            training = world.start_round()  # who is visible; they train now where a method needs it
            self.learn(previous)  # on a GPU: from the last round, while the clients train
            views = world.views(training)
            choices = self.selectors.select(views)
            world.aggregate(world.collect(choices))  # the chosen train, if nobody has yet
            previous = world.score(on_test=self.lanes_on_test())
            stop = should_stop()
            save = stop or any(run.is_due(run.config.checkpoint.every) for run in self.unfinished)
            if save or not self.learns_later or self.models_are_kept():
                self.learn(previous, save)
                previous = None
            if stop and any(not run.is_finished for run in self.unfinished):
                raise Stopped
            if save:
                self.finish_runs()

    def learn(self, results: RoundResults | None, save: bool = False) -> None:
        """Let selectors learn from a round and write its records; None: there is none.

        Args:
            results: of the round.
            save: replace the checkpoints, too.
        """
        if results is None:
            return
        metrics = self.selectors.feedback(results.outcomes())
        records = results.records(metrics)
        seconds = (time.perf_counter() - self._last_time) / len(records)
        for record in records:
            record["seconds"] = seconds
        first = 0  # the lanes of the world are those of the unfinished runs, in order
        for run in self.unfinished:
            last = first + len(run.lanes)
            run.add(records[first:last])
            first = last
        if save:
            self.save()
        self.listener.round(records)
        self._last_time = time.perf_counter()  # writing and saving are not part of a round

    def lanes_on_test(self) -> list[bool]:
        """Return which lanes' newest models are scored on the test set."""
        on_test: list[bool] = []
        for run in self.unfinished:
            is_due = run.is_due(run.config.evaluate.every)
            on_test += [is_due] * len(run.lanes)
        return on_test

    def models_are_kept(self) -> bool:
        """True where models are stored before the next round begins."""
        return any(run.is_due(run.config.checkpoint.keep_models) for run in self.unfinished)

    def save(self) -> None:
        """Replace the checkpoints of all runs, so that they resume together.

        `storage/checkpoint.py` says how this survives being killed.
        """
        folders = [run.folder for run in self.unfinished if run.folder is not None]
        is_alone = len(folders) == 1
        for run in self.unfinished:
            if run.folder is None:
                continue
            state = snapshot(self.world, run.lanes)
            for lane, saved in zip(run.lanes, state["lanes"], strict=True):
                check_state(lane.method.selector, saved["selector"])
            if is_alone:
                run.folder.save(state)
            else:
                run.folder.prepare(state)
        if not is_alone:
            for folder in folders:
                folder.take_over()

    def finish_runs(self) -> None:
        """Finish the runs that have all their rounds, and take their lanes out of the world."""
        unfinished: list[PackedRun] = []
        finished_lanes: list[Lane] = []
        for run in self.unfinished:
            if run.is_finished:
                run.finish()
                finished_lanes += run.lanes
            else:
                unfinished.append(run)
        self.unfinished = unfinished
        if finished_lanes and unfinished:  # the lanes of the last runs stay, to be looked at
            self.world.retire(finished_lanes)
            self.selectors = selectors_of(self.world)


def trains_in_background(world: World) -> bool:
    """True where clients train while the server does something else: on a GPU."""
    return world.states.is_cuda


def _is_fault_of_user_code(error: Exception) -> bool:
    """True where the user is asked to fix their own code."""
    has_cause = error.__cause__ is not None  # ours, such as a disk that is full
    return (isinstance(error, UserError) and not has_cause) or users_fault(error) is not None


class PackedRun:
    """One of the runs that share a world."""

    def __init__(self, config: Config, path: Path | None, world: World, lanes: list[Lane]) -> None:
        self.config = config
        self.world = world
        self.lanes = lanes
        self.folder = None if path is None else RunFolder(path)
        self.live = LiveLog(config, path)
        self.in_memory: list[dict[str, Any]] = []  # records; with a folder they are only there
        self.summary: dict[str, Any] = {}

    @property
    def rounds_done(self) -> int:
        """Finished rounds."""
        return self.lanes[0].round_num

    @property
    def is_finished(self) -> bool:
        """True after the last round."""
        return self.rounds_done >= self.config.rounds

    def is_due(self, every: int) -> bool:
        """True after every `every`-th round and after the last one; 0: never."""
        rounds_done = self.lanes[0].round_num
        return every > 0 and (rounds_done % every == 0 or rounds_done >= self.config.rounds)

    def open(self, resume: bool) -> None:
        """Make the folder ready and continue where the run stopped, if it did."""
        if self.folder is not None:
            state = self.folder.open(self.config, resume)
            if state is not None:
                self._restore(state)
            with writing(self.folder.path):
                store_class_counts(self.folder.path, self.config, self.lanes)
            self._keep_models()
        self.live.begin(self.config.method, self.rounds_done, self.config.rounds)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, after a look at what its checksum cannot see."""
        assert self.folder is not None
        path = self.folder.checkpoint.path
        with fitting(path):
            check_round(path, state["round"], self.config.rounds)
            positions = positions_of(self.world, self.lanes)
            for r, saved in zip(positions, state.get("lanes", ()), strict=False):
                check_round(path, saved["round"], self.config.rounds)
                check_lane(path, saved, self.world.states[r])
            restore(self.world, state, self.lanes)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a round, one for each lane of the run, and write them."""
        numbered = [{**record, "lane": i} for i, record in enumerate(records)]
        if self.folder is None:
            self.in_memory += numbered
        else:
            self.folder.append(numbered)
            self._keep_models()
        if self.live.sinks:
            self.live.round(numbered)

    def _keep_models(self) -> None:
        """Keep the models that the coming round starts from, if the configuration says so."""
        if self.folder is not None and self.is_due(self.config.checkpoint.keep_models):
            states = self.world.states[positions_of(self.world, self.lanes)]
            save_models(self.folder.path, self.rounds_done, states)

    def finish(self) -> None:
        """Write what is written after the last round."""
        save_policies(self.config, self.lanes)
        self.summary = {"method": self.config.method}
        records = self.in_memory if self.folder is None else self.folder.read()
        self.summary |= summarise(records, self.config.rounds)
        self.summary |= latecomers(self.world, self.lanes)
        if self.folder is not None:
            self.folder.finish(self.summary)

    def result(self) -> Result:
        """Return the finished run."""
        path = None if self.folder is None else self.folder.path
        return Result(self.config, self.summary, self.world, path, self.in_memory)


def check_policy(config: Config, lanes: Sequence[Lane]) -> None:
    """Raise UserError where a method lacks a policy to store, or needs no permission it was given.

    Reports recognise the run of an oracle by its permission, so no other run may have it.
    """
    if config.options.get(PERMISSION) and not any(lane.oracle for lane in lanes):
        raise UserError(
            f"options.{PERMISSION}={config.options[PERMISSION]}, but method={config.method} reads "
            f"nothing that a server may not know: leave options.{PERMISSION} out."
        )
    check_use(config.agent.save, config.agent.load, config.method, lanes[0].method.selector)


def save_policies(config: Config, lanes: Sequence[Lane]) -> None:
    """Write what the selectors have learnt to `agent.save`, if it is set."""
    if not config.agent.save:
        return
    for lane in lanes:
        policy = cast(Any, lane.method.selector).policy()
        write_policy(policy, config.agent.save, lane.seed, len(lanes))
