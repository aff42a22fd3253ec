"""The server of real devices: its own loop on push and pull, with the simulator's run folder.

    Server(config, problem, out=folder).run(grid)

After every round a record is written and a checkpoint replaces the last one, so that a server that
was killed resumes: run it again with the same folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
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
from fedglimpse.flower.clients import KnownClients
from fedglimpse.flower.deployment import (
    Deployment,
    Problem,
    RoundPlan,
    ServerTerms,
    check_settings,
    fresh_model,
    method_on_devices,
)
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.handshake import Handshake, wait_until
from fedglimpse.flower.round import run_round
from fedglimpse.methods.base import Setting
from fedglimpse.runs.folder import RunFolder, writing
from fedglimpse.runs.saved_state import check_lane, check_round, fitting
from fedglimpse.runs.summary import summarise
from fedglimpse.storage import store
from fedglimpse.types import Method

log = logging.getLogger("flwr.fedglimpse")


@dataclass(frozen=True)
class FinishedRun:
    """The result of a run on devices."""

    records: list[dict[str, Any]]
    summary: dict[str, Any]
    state: Tensor  # [d] the final global model
    names: list[str]  # identity of every dense client id


@dataclass
class Server:
    """Runs a method on the clients of a Flower grid.

    Attributes:
        config: a `Config`, or dotted keys; `data.clients` is the largest number of clients,
            `visibility.*` hides some of those that are online.
        problem: model and the server's examples.
        terms: timeouts and quorum.
        out: the run folder; a run that it already holds is continued. None: nothing is written.
        user_settings: the user's own settings, sent to every client with its work.
    """

    config: Config | Mapping[str, Any]
    problem: Problem
    terms: ServerTerms = field(default_factory=ServerTerms)
    out: Path | str | None = None
    user_settings: Mapping[str, wire.Plain] = field(default_factory=dict)

    def run(self, grid: Grid, start: Tensor | None = None) -> FinishedRun:
        """Run all remaining rounds.

        Args:
            grid: Flower's way to the nodes.
            start: the initial model `[d]`; None: initialised from the run's seed.
        """
        config = self.config if isinstance(self.config, Config) else resolve(self.config)
        config = replace(config, checkpoint=replace(config.checkpoint, every=1))
        method = self._check(config, start)
        if self.out is None:
            return self._serve(config, method, None, grid, start)
        folder = RunFolder(Path(self.out))
        with folder.alone():
            return self._serve(config, method, folder, grid, start)

    def _check(self, config: Config, start: Tensor | None) -> Method:
        """Return the method; raises UserError for a run that cannot start."""
        check(config)
        check_settings(config)
        num_clients = config.data.clients
        if len(config.seeds) != 1:
            raise UserError(
                f"seeds={list(config.seeds)}: devices run one seed at a time, such as seeds=[0].",
                key="seeds",
            )
        if num_clients < 1:
            raise UserError(
                "data.clients=0 lets no client take part: use the largest number of clients, "
                "such as 100.",
                key="data.clients",
            )
        if self.terms.min_clients > num_clients:
            raise UserError(
                f"min_clients={self.terms.min_clients} is more than "
                f"data.clients={num_clients}: use at most {num_clients}.",
                key="terms.min_clients",
            )
        layout = Layout.of(self.problem.model())
        if start is not None and start.shape != (layout.size,):
            raise UserError(
                f"The initial model has shape {list(start.shape)}, but problem.model has "
                f"{layout.size} floats: start from a state of the same model."
            )
        setting = Setting(
            config=config,
            seed=config.seeds[0],
            sizes=torch.ones(num_clients).long(),  # unknown before clients say hello
            num_classes=self.problem.num_classes,
            num_params=layout.num_params,
        )
        method = method_on_devices(setting)
        check_use(config.agent.save, config.agent.load, config.method, method.selector)
        return method

    def _serve(
        self,
        config: Config,
        method: Method,
        folder: RunFolder | None,
        grid: Grid,
        start: Tensor | None,
    ) -> FinishedRun:
        """Run all remaining rounds, in a folder that no other run uses meanwhile."""
        saved = None
        clients = KnownClients(config.data.clients)
        if folder is not None:
            saved = self._open(config, folder)
            if saved is not None:
                clients.load_state_dict(saved["roster"])
            _write_names(folder, clients)
        first_round = 0 if saved is None else saved["round"]
        exchange = Exchange(grid, self.terms.poll, self.terms.patience)
        handshake = self._handshake(config, method, exchange, clients)
        if first_round < config.rounds:
            self._await_clients(handshake, first_round, resumed=saved is not None)
        deployment = self._deployment(config, exchange, clients, start, saved)
        records = [] if folder is None else folder.read()
        for round_num in range(first_round, config.rounds):
            record = run_round(deployment, handshake, round_num)
            records.append(record)
            if folder is not None:
                _save(folder, deployment, record)
            log.info("%s", progress_line(record, config.rounds))
        return self._finish(deployment, folder, records)

    def _open(self, config: Config, folder: RunFolder) -> dict[str, Any] | None:
        """Return the checkpoint to continue from, if any; another run's folder is not changed."""
        folder.check(config, resume=True)
        checkpoint = folder.checkpoint.read()
        if checkpoint is not None:
            self._check_continues(checkpoint, folder)
        return folder.open(config, resume=True)

    def _check_continues(self, checkpoint: Mapping[str, Any], folder: RunFolder) -> None:
        """Raise UserError for a checkpoint of the simulator, or of another model."""
        if "roster" not in checkpoint:
            raise UserError(
                f"{folder.path} holds a run of the simulator: continue it with fedglimpse run "
                "--resume, or name another out.",
                key="out",
            )
        layout = Layout.of(self.problem.model())
        model = wire.fingerprint(layout)
        if checkpoint.get("model", model) != model:
            raise UserError(
                f"{folder.path} holds a run of another model, with "
                f"{len(checkpoint['federation']['state'])} floats, while problem.model has "
                f"{layout.size}: build the model that it began with, or name another out.",
                key="out",
            )

    def _handshake(
        self, config: Config, method: Method, exchange: Exchange, clients: KnownClients
    ) -> Handshake:
        run_settings = wire.run_settings(config, method.objective, self.problem.num_classes)
        return Handshake(
            exchange=exchange,
            clients=clients,
            settings={**self.user_settings, **run_settings},
            hello_timeout=self.terms.hello_timeout,
            required=RoundPlan.of(method, config).required,
            max_examples=self.terms.max_examples,
        )

    def _await_clients(self, handshake: Handshake, first_round: int, resumed: bool) -> None:
        """Wait until enough clients have said hello; a run that is resumed waits for only one."""
        required = 1 if resumed else self.terms.min_clients or handshake.clients.capacity
        online: list[int] = []

        def enough_online() -> bool:
            online[:] = handshake.online(first_round)
            return len(online) >= required

        if not wait_until(enough_online, handshake.exchange, self.terms.start_timeout):
            reasons = " ".join(dict.fromkeys(handshake.refusals.values()))
            sentence = (
                f"{len(online)} of {required} clients were online after "
                f"{self.terms.start_timeout:g} s: start more SuperNodes, or lower min_clients. "
                f"{reasons}"
            )
            raise UserError(sentence.rstrip(), key="terms.min_clients")

    def _deployment(
        self,
        config: Config,
        exchange: Exchange,
        clients: KnownClients,
        start: Tensor | None,
        saved: Mapping[str, Any] | None,
    ) -> Deployment:
        sizes = torch.tensor(clients.typical_sizes()) if saved is None else saved["sizes"]
        if start is None:
            model = fresh_model(config, self.problem)
            start = Layout.of(model).read(model)
        deployment = Deployment.build(
            config=config,
            problem=self.problem,
            terms=self.terms,
            exchange=exchange,
            clients=clients,
            state=start,
            user_settings=self.user_settings,
            sizes=sizes,
        )
        if saved is not None:
            path = RunFolder(Path(str(self.out))).checkpoint.path
            with fitting(path):
                check_round(path, saved["round"], config.rounds)
                check_lane(path, saved["federation"], deployment.state)
                deployment.load_state_dict(saved["federation"])
        return deployment

    def _finish(
        self, deployment: Deployment, folder: RunFolder | None, records: list[dict[str, Any]]
    ) -> FinishedRun:
        config = deployment.config
        if config.agent.save:
            policy = cast(Any, deployment.method.selector).policy()
            write_policy(policy, config.agent.save, deployment.seed, 1)
        summary = {"method": config.method, **summarise(records, config.rounds)}
        if folder is not None:
            folder.finish(summary)
        names = list(deployment.clients.names)
        return FinishedRun(records, summary, deployment.state, names)


def progress_line(record: Mapping[str, Any], rounds: int) -> str:
    """Return one line about a round, for the log."""
    accuracy = "-" if record["accuracy"] is None else f"{record['accuracy']:.3f}"
    line = (
        f"round {record['round'] + 1}/{rounds}: {len(record['visible'])} visible, "
        f"selected {record['selected']}, accuracy {accuracy}"
    )
    if record["failed"]:
        line += f", failed {record['failed']}"
    return line


def _save(folder: RunFolder, deployment: Deployment, record: dict[str, Any]) -> None:
    """Write a round and make it the one to continue from."""
    folder.append([record])
    folder.save(
        {
            "round": record["round"] + 1,
            "federation": deployment.state_dict(),
            "roster": deployment.clients.state_dict(),
            "sizes": deployment.setting.sizes,
            "model": wire.fingerprint(deployment.layout),
        }
    )
    _write_names(folder, deployment.clients)


def _write_names(folder: RunFolder, clients: KnownClients) -> None:
    """Write the identity of every client id; the file marks the folder as a run on devices."""
    content = json.dumps(clients.names, indent=1).encode()
    if store.is_committed(folder.clients) and folder.clients.read_bytes() == content:
        return
    with writing(folder.path):
        store.commit(folder.path, {folder.clients.name: content})
