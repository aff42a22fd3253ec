"""The server of real devices: its own loop on push and pull, with the simulator's run folder.

    Server(config, problem, out=folder).run(grid)

A round is observe, select, commit and feedback, as in the simulator. After every round a record is
written and a checkpoint replaces the last one, so that a server that was killed goes on where it
was: run it again with the same folder.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedglimpse.agent.policy import check_use, write_policy
from fedglimpse.config.checks import check
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation.state import Layout
from fedglimpse.flower import messages as wire
from fedglimpse.flower.clients import Federation, Problem, Terms, fresh_model
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.handshake import Reception, wait_until
from fedglimpse.flower.identity import Roster
from fedglimpse.flower.round import Round
from fedglimpse.flower.round_log import Sheet
from fedglimpse.flower.served import check_served, method_of, plan_of
from fedglimpse.methods.base import Setting
from fedglimpse.runs.folder import RunFolder, write_atomically, writing
from fedglimpse.runs.summary import summarise
from fedglimpse.types import Method

__all__ = ["Finished", "Problem", "Server", "Terms"]

log = logging.getLogger("flwr.fedglimpse")


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    records: list[dict[str, Any]]
    summary: dict[str, Any]
    state: Tensor  # [d] the final global model
    names: list[str]  # identity of every dense client id


@dataclass
class Server:
    """Runs a method on the clients of a Flower grid.

    Attributes:
        config: a `Config`, or dotted keys; `data.clients` is how many clients there may be,
            `visibility.*` filters those that are online on top of what the world does.
        problem: model and the server's examples.
        terms: timeouts and quorum.
        out: the run folder; a run that it already holds is continued. None: nothing is written.
        told: the user's own settings, sent to every client with its work.
    """

    config: Config | Mapping[str, Any]
    problem: Problem
    terms: Terms = field(default_factory=Terms)
    out: Path | str | None = None
    told: Mapping[str, wire.Plain] = field(default_factory=dict)

    def run(self, grid: Grid, start: Tensor | None = None) -> Finished:
        """Run all rounds that are left.

        Args:
            grid: Flower's way to the nodes.
            start: the initial model `[d]`; None: initialised from the run's seed.
        """
        config = self.config if isinstance(self.config, Config) else resolve(self.config)
        config = replace(config, checkpoint=replace(config.checkpoint, every=1))
        method = self._check(config, start)
        folder = None if self.out is None else RunFolder(Path(self.out))
        with nullcontext() if folder is None else folder.alone():
            return self._serve(config, method, folder, grid, start)

    def _serve(
        self,
        config: Config,
        method: Method,
        folder: RunFolder | None,
        grid: Grid,
        start: Tensor | None,
    ) -> Finished:
        """Run all rounds that are left in a folder that is ours alone."""
        saved = None if folder is None else self._open(config, folder)
        first = 0 if saved is None else saved["round"]
        exchange = Exchange(grid, self.terms.poll, self.terms.patience)
        roster = Roster(config.data.clients)
        if saved is not None:
            roster.load_state_dict(saved["roster"])
        if folder is not None:
            _name_clients(folder, roster)
        told = {**self.told, **wire.about(config, method.objective, self.problem.num_classes)}
        wanted = plan_of(method, config).wanted
        reception = Reception(exchange, roster, told, self.terms.hello_timeout, wanted)
        if first < config.rounds:
            self._await_clients(reception, first, resumed=saved is not None)
        fed = self._federation(config, exchange, roster, start, saved)
        records = folder.read() if folder is not None else []
        for round_num in range(first, config.rounds):
            record = play_round(fed, reception, round_num)
            records.append(record)
            if folder is not None:
                _save(folder, fed, record)
            log.info("%s", line_of(record, config))
        return self._finish(fed, folder, records)

    def _check(self, config: Config, start: Tensor | None) -> Method:
        """Return the method; UserError for a run that cannot be, before anything is done."""
        check(config)
        check_served(config)
        if len(config.seeds) != 1:
            raise UserError(
                f"seeds={list(config.seeds)}: devices run one seed at a time, such as seeds=[0]."
            )
        if config.data.clients < 1:
            raise UserError("data.clients=0: say how many clients there may be, such as 100.")
        if self.terms.min_clients > config.data.clients:
            raise UserError(
                f"min_clients={self.terms.min_clients} is more than "
                f"data.clients={config.data.clients}: use at most {config.data.clients}."
            )
        layout, even = Layout.of(self.problem.model()), torch.ones(config.data.clients).long()
        setting = Setting(
            config, config.seeds[0], even, self.problem.num_classes, layout.num_params
        )
        if start is not None and start.shape != (layout.size,):
            raise UserError(
                f"The initial model has shape {list(start.shape)}, but problem.model has "
                f"{layout.size} floats: start from a state of the same model."
            )
        method = method_of(setting)
        check_use(config.agent.save, config.agent.load, config.method, method.selector)
        return method

    def _open(self, config: Config, folder: RunFolder) -> dict[str, Any] | None:
        """Return what to continue from, if anything; what cannot be continued stays as it is."""
        folder.check(config, resume=True)
        there = folder.checkpoint.read()
        if there is not None and "roster" not in there:
            raise UserError(
                f"{folder.path} holds a run of the simulator: continue it with fedglimpse run "
                "--resume, or name another out."
            )
        layout = Layout.of(self.problem.model())
        ours = wire.fingerprint(layout)
        if there is not None and there.get("model", ours) != ours:
            raise UserError(
                f"{folder.path} holds a run of another model, with "
                f"{len(there['federation']['state'])} floats, while problem.model has "
                f"{layout.size}: build the model that it began with, or name another out."
            )
        return folder.open(config, resume=True)

    def _await_clients(self, reception: Reception, first: int, resumed: bool) -> None:
        """Wait until enough clients have said hello; a run that is resumed goes on with any."""
        wanted = 1 if resumed else self.terms.min_clients or reception.roster.room
        met: list[int] = []

        def enough() -> bool:
            met[:] = reception.online(first)
            return len(met) >= wanted

        if not wait_until(enough, reception.exchange, self.terms.start_timeout):
            why = " ".join(dict.fromkeys(reception.refusals.values()))
            raise UserError(
                f"{len(met)} of {wanted} clients were there after {self.terms.start_timeout:g} s: "
                f"start more SuperNodes, or lower min_clients. {why}".rstrip()
            )

    def _federation(
        self,
        config: Config,
        exchange: Exchange,
        roster: Roster,
        start: Tensor | None,
        saved: Mapping[str, Any] | None,
    ) -> Federation:
        sizes = torch.tensor(roster.typical_sizes()) if saved is None else saved["sizes"]
        if start is None:
            model = fresh_model(config, self.problem)
            start = Layout.of(model).read(model)
        fed = Federation.build(
            config, self.problem, self.terms, exchange, roster, start, self.told, sizes
        )
        if saved is not None:
            fed.load_state_dict(saved["federation"])
        return fed

    def _finish(
        self, fed: Federation, folder: RunFolder | None, records: list[dict[str, Any]]
    ) -> Finished:
        config = fed.config
        if config.agent.save:
            policy = cast(Any, fed.method.selector).policy()
            write_policy(policy, config.agent.save, fed.seed, 1)
        summary = {"method": config.method, **summarise(records, config.rounds)}
        if folder is not None:
            folder.finish(summary)
        return Finished(records, summary, fed.state, list(fed.roster.names))


def play_round(fed: Federation, reception: Reception, round_num: int) -> dict[str, Any]:
    """Play one round with whoever is there; returns its record."""
    began = time.perf_counter()
    visible: list[int] = []

    def enough() -> bool:
        shown = set(fed.visibility.visible(fed.seed, round_num).tolist())
        online, sizes = reception.online(round_num), fed.roster.typical_sizes()
        visible[:] = [c for c in online if c in shown and sizes[c] > 0]
        return len(visible) >= fed.config.visibility.min_visible

    metrics: Mapping[str, float] = {}
    ready = wait_until(enough, fed.exchange, fed.terms.visible_timeout)
    sheet = Sheet(round_num, list(visible))
    if ready:
        metrics = Round(fed, sheet).play()
    every, last = fed.config.evaluate.every, fed.config.rounds - 1
    scored = (round_num + 1) % every == 0 or round_num == last
    record = sheet.record(fed, metrics, scored)
    return replace(record, seconds=time.perf_counter() - began).to_json()


def line_of(record: Mapping[str, Any], config: Config) -> str:
    """Say in one line what a round did."""
    accuracy = "-" if record["accuracy"] is None else f"{record['accuracy']:.3f}"
    text = (
        f"round {record['round'] + 1}/{config.rounds}: {len(record['visible'])} visible, "
        f"selected {record['selected']}, accuracy {accuracy}"
    )
    return text + (f", failed {record['failed']}" if record["failed"] else "")


def _save(folder: RunFolder, fed: Federation, record: dict[str, Any]) -> None:
    """Write a round and make it the place to continue from."""
    folder.append([record])
    folder.save(
        {
            "round": record["round"] + 1,
            "federation": fed.state_dict(),
            "roster": fed.roster.state_dict(),
            "sizes": fed.setting.sizes,
            "model": wire.fingerprint(fed.layout),
        }
    )
    _name_clients(folder, fed.roster)


def _name_clients(folder: RunFolder, roster: Roster) -> None:
    """Write who is who, which also tells that this is a run on devices: from its start on."""
    with writing(folder.path):
        write_atomically(folder.clients, json.dumps(roster.names, indent=1))
