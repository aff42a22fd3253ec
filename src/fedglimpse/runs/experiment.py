"""Runs from start to end: build a world, play its rounds, write records, save, resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from fedglimpse.agent.policy import check_use, write_policy
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation.reports import PERMISSION
from fedglimpse.plugins import users_fault
from fedglimpse.runs.build import build_world
from fedglimpse.runs.folder import RunFolder, writing
from fedglimpse.runs.kept_models import save_models
from fedglimpse.runs.progress import Listener, Silent
from fedglimpse.runs.rounds import Books, crew_of, nothing, open_round, places_of, restore, snapshot
from fedglimpse.runs.summary import summarise
from fedglimpse.runs.trackers import LiveLog
from fedglimpse.simulation.lane import check_state
from fedglimpse.simulation.world import Lane, World
from fedglimpse.storage.checkpoint import settle


class Stopped(Exception):
    """The run was asked to stop; it ended after a whole round and can be resumed."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    world: World
    path: Path | None


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
        resume: go on with the run in `out`, if there is one.
        listener: told about every round.
        should_stop: asked after every round; True ends the run with `Stopped`.

    Example:
        >>> result = run({"method": "fedavg-window", "rounds": 2, "seeds": [0, 1]})
        >>> len(result.records)
        4
    """
    if not isinstance(config, Config):
        config = resolve(config)
    world, parts = _gather([(config, None if out is None else Path(out))])
    folder = parts[0].folder
    with nullcontext() if folder is None else folder.alone():
        return _run_all(world, parts, resume, listener, should_stop)[0]


def run_together(
    runs: Sequence[tuple[Config, Path | None]],
    *,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Run several federations side by side: their clients train in the same batches.

    Each has its own folder, and gives the same records as alone up to floating-point tolerance.
    Keeping other processes out of the folders is the caller's part.

    Args:
        runs: configurations whose `builder.together_key` is the same, with their run folders.
        resume: go on with the runs that are in their folders.
        listener: told about every round of all of them.
        should_stop: asked after every round; True ends them with `Stopped`.
    """
    world, parts = _gather(runs)
    return _run_all(world, parts, resume, listener, should_stop)


def _gather(runs: Sequence[tuple[Config, Path | None]]) -> tuple[World, list[_Part]]:
    """Build what the runs share, with all that can be wrong with them found: nothing is written."""
    for _, path in runs:
        if path is not None:
            RunFolder(path).check_simulated()
    world = build_world([config for config, _ in runs])
    lanes = iter(list(world.lanes))
    parts = [_Part(c, path, [next(lanes) for _ in c.seeds]) for c, path in runs]
    for part in parts:
        check_policy(part.config, part.lanes)
    return world, parts


def _run_all(
    world: World,
    parts: Sequence[_Part],
    resume: bool,
    listener: Listener | None,
    should_stop: Callable[[], bool],
) -> list[Result]:
    """Open the folders, play all rounds, return what came out."""
    listener = listener or Silent()
    name = parts[0].config.method if len(parts) == 1 else f"{len(parts)} runs"
    pack = [part.folder for part in parts if part.folder is not None]
    with writing(pack[0].path) if pack else nullcontext():
        settle([folder.checkpoint for folder in pack])
    with ExitStack() as after:
        for part in parts:
            after.callback(part.live.end)
            part.open(world, resume)
        listener.begin(name, min(p.done for p in parts), max(p.config.rounds for p in parts))
        after.callback(listener.end)
        try:
            _play(world, parts, listener, should_stop)
        except Exception as error:
            if _of_users_code(error):
                for folder in pack:
                    folder.allow_code_change()
            raise
    return [part.result(world) for part in parts]


def _of_users_code(error: Exception) -> bool:
    """True where mending their own code is what the user is told to do."""
    ours = error.__cause__ is not None  # such as a disk that is full
    return (isinstance(error, UserError) and not ours) or users_fault(error) is not None


class _Part:
    """One of the runs that share a world."""

    def __init__(self, config: Config, path: Path | None, lanes: list[Lane]) -> None:
        self.config, self.lanes = config, lanes
        self.folder = None if path is None else RunFolder(path)
        self.live = LiveLog(config, path)
        self.records: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    @property
    def done(self) -> int:
        """Rounds played."""
        return self.lanes[0].round_num

    def open(self, world: World, resume: bool) -> None:
        """Make the folder ready and go to where it stopped, if it did."""
        if self.folder is not None:
            state = self.folder.open(self.config, resume)
            if state is not None:
                restore(world, state, self.lanes)
            self.records = self.folder.read()
            self._keep_models(world)
        self.live.begin(self.config.method, self.done, self.config.rounds)

    @property
    def due(self) -> bool:
        """True after a round that is to be saved."""
        return self.done % self.config.checkpoint.every == 0 or self.done == self.config.rounds

    @property
    def keeps(self) -> bool:
        """True after a round whose models are to be kept."""
        every = self.config.checkpoint.keep_models
        return every > 0 and (self.done % every == 0 or self.done == self.config.rounds)

    def take(self, world: World, records: Mapping[int, dict[str, Any]]) -> None:
        """Take in a round's records, by lane, and write them."""
        new = [{**records[id(lane)], "lane": i} for i, lane in enumerate(self.lanes)]
        self.records += new
        if self.folder is not None:
            self.folder.append(new)
            self._keep_models(world)
        self.live.round(new)

    def _keep_models(self, world: World) -> None:
        """Keep the models that the coming round starts from, where they are asked for."""
        if self.keeps and self.folder is not None:
            save_models(self.folder.path, self.done, world.states[places_of(world, self.lanes)])

    def finish(self) -> None:
        """Write what is left when the last round is over."""
        save_policies(self.config, self.lanes)
        self.summary = {"method": self.config.method}
        self.summary |= summarise(self.records, self.config.rounds)
        if self.folder is not None:
            self.folder.finish(self.summary)

    def result(self, world: World) -> Result:
        """Return the finished run."""
        path = None if self.folder is None else self.folder.path
        return Result(self.config, self.records, self.summary, world, path)


def _play(
    world: World, parts: Sequence[_Part], listener: Listener, should_stop: Callable[[], bool]
) -> None:
    """Play rounds until every run has all of its own; a run that is over leaves the world."""
    going, crew = list(parts), crew_of(world)
    finish: Callable[[], object] = nothing  # the last round, where that was put off
    while True:
        over = [part for part in going if part.done >= part.config.rounds]
        going = [part for part in going if part.done < part.config.rounds]
        for part in over:
            part.finish()
        if not going:
            return
        if over:
            world.retire([lane for part in over for lane in part.lanes])
        evaluate = [scored(part.config, part.done) for part in going for _ in part.lanes]
        crew = crew_of(world, crew)
        books = partial(_books, world, going, open_round(world, evaluate, crew, finish))
        stop, due = should_stop(), any(part.due for part in going)
        if books_can_wait(world) and not (stop or due or any(part.keeps for part in going)):
            finish = partial(_tell, listener, books)
            continue
        records, finish = books(), nothing
        del books  # and with it what the clients of this round sent
        if stop or due:
            _save(world, going)
        listener.round(records)
        if stop and any(part.done < part.config.rounds for part in going):
            raise Stopped


def books_can_wait(world: World) -> bool:
    """True where clients train while a server does something else: on a GPU."""
    return world.states.is_cuda


def _books(world: World, parts: Sequence[_Part], books: Books) -> list[dict[str, Any]]:
    """Let selectors learn from the last round that was opened, and write its records."""
    records = books()
    of_lane = {id(lane): record for lane, record in zip(world.lanes, records, strict=True)}
    for part in parts:
        part.take(world, of_lane)
    return records


def _tell(listener: Listener, books: Books) -> None:
    listener.round(books())


def _save(world: World, parts: Sequence[_Part]) -> None:
    """Replace the checkpoints of all, so that they resume together (`storage/checkpoint.py`)."""
    stored = [(part.folder, part.lanes) for part in parts if part.folder is not None]
    for folder, lanes in stored:
        state = snapshot(world, lanes)
        for lane, saved in zip(lanes, state["lanes"], strict=True):
            check_state(lane.method.selector, saved["selector"])
        folder.prepare(state)
    for folder, _ in stored:
        folder.take_over()


def check_policy(config: Config, lanes: Sequence[Lane]) -> None:
    """Raise UserError where a method has not what is asked of it: a policy, a need to be allowed.

    Reports mark a run as an oracle's by its permission, so nobody else may have it.
    """
    if config.options.get(PERMISSION) and not any(lane.oracle for lane in lanes):
        raise UserError(
            f"options.{PERMISSION}={config.options[PERMISSION]}, but method={config.method} reads "
            f"nothing that a server may not know: leave options.{PERMISSION} out."
        )
    check_use(config.agent.save, config.agent.load, config.method, lanes[0].method.selector)


def save_policies(config: Config, lanes: Sequence[Lane]) -> None:
    """Write what the selectors have learnt, if `agent.save` says so."""
    if not config.agent.save:
        return
    for lane in lanes:
        policy = cast(Any, lane.method.selector).policy()
        write_policy(policy, config.agent.save, lane.seed, len(lanes))


def scored(config: Config, round_num: int) -> bool:
    """True where this round's model is scored on the test set."""
    return (round_num + 1) % config.evaluate.every == 0 or round_num == config.rounds - 1
