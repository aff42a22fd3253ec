"""One round on real devices: wait for clients, ask, select, collect, aggregate, give feedback."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.flower import messages as wire
from fedglimpse.flower.claims import clipped, clipped_sizes
from fedglimpse.flower.deployment import Deployment
from fedglimpse.flower.handshake import Handshake, wait_until
from fedglimpse.flower.requests import CheckedUpdate, ClientRequests
from fedglimpse.flower.round_log import RoundLog
from fedglimpse.simulation.lane import TrainedClients
from fedglimpse.simulation.plugin_checks import check_choice, checked_step
from fedglimpse.types import Choice, Outcome, Update, View


def run_round(
    deployment: Deployment,
    handshake: Handshake,
    round_num: int,
) -> dict[str, Any]:
    """Run one round with the clients that are online; returns its line of rounds.jsonl."""
    start_time = time.perf_counter()
    config = deployment.config
    visible: list[int] = []

    def enough_visible() -> bool:
        visible[:] = _visible_clients(deployment, handshake, round_num)
        return len(visible) >= config.visibility.min_visible

    metrics: Mapping[str, float] = {}
    timeout = deployment.terms.visible_timeout
    ready = wait_until(enough_visible, deployment.exchange, timeout)
    log = RoundLog(round_num, list(visible))
    if ready:
        metrics = DeviceRound(deployment, log).run()
    scores = None
    rounds_done = round_num + 1
    if rounds_done == config.rounds or rounds_done % config.evaluate.every == 0:
        problem = deployment.problem
        x, y = problem.test or problem.proxy
        scores = deployment.evaluator.score(deployment.state, x, y)
    record = log.record(deployment, metrics, scores)
    seconds = time.perf_counter() - start_time
    return replace(record, seconds=seconds).to_json()


def _visible_clients(
    deployment: Deployment,
    handshake: Handshake,
    round_num: int,
) -> list[int]:
    """Return the clients that are online, have data, and are not hidden by `visibility.*`."""
    pattern = deployment.visibility
    shown = set(pattern.visible(deployment.seed, round_num).tolist())
    online = handshake.online(round_num)
    sizes = deployment.clients.typical_sizes()
    visible = []
    for client in online:
        if client in shown and sizes[client] > 0:
            visible.append(client)
    return visible


@dataclass(frozen=True)
class UsedUpdate:
    """An update that goes into the next global model."""

    position: int  # in the choice, which says its weight
    client: int
    update: CheckedUpdate


class DeviceRound:
    """Runs one round with the visible clients of a log, and fills in the log."""

    def __init__(self, deployment: Deployment, log: RoundLog) -> None:
        self.deployment = deployment
        self.log = log
        self.requests = ClientRequests(deployment, log)
        self.round_num = log.round_num

    def run(self) -> Mapping[str, float]:
        """Run the round; returns the metrics of the selector's feedback."""
        deployment = self.deployment
        selector = deployment.method.selector
        view, updates = self._observe()
        if view is None:
            return {}
        k = deployment.method.budget(deployment.config.selection.k, view.num_visible)
        choice = selector.select(view, k)
        check_choice(choice, view, k, selector)
        self.log.chose = True
        self.log.info = choice.info
        used = self._collect(view, choice, updates)
        if not self._enough(len(used), len(choice.slots)):
            used = []
        outcome = self._aggregate(choice, used)
        return selector.feedback(outcome)

    def _enough(self, answered: int, asked: int) -> bool:
        quorum = math.ceil(self.deployment.terms.quorum * asked)
        return answered >= max(1, quorum)

    def _observe(self) -> tuple[View | None, dict[int, CheckedUpdate]]:
        """Ask every visible client, if the method needs reports before it chooses.

        Returns:
            What the method may see, None where too few answered, and the updates that came with
            the reports, by client.
        """
        deployment = self.deployment
        plan = deployment.plan
        visible = self.log.visible
        updates: dict[int, CheckedUpdate] = {}
        reports: Mapping[int, Mapping[str, Tensor]] = {client: {} for client in visible}
        if plan.uploads_all:
            needed_reports = plan.before_choice | plan.with_update
            updates = self.requests.ask_updates(visible, needed_reports)
            reports = {client: update.reports for client, update in updates.items()}
        elif plan.asks_all:
            kind = wire.SKETCH if plan.trains_all else wire.PROBE
            reports = self.requests.ask_reports(kind, visible)
        if plan.trains_all:
            deployment.visits += len(visible)
        ids = [client for client in visible if client in reports]
        if not self._enough(len(ids), len(visible)):
            return None, {}
        needs = deployment.method.selector.needs
        rows = {}  # report -> [V, ...]
        for name in sorted(plan.before_choice):
            of_clients = [reports[client][name] for client in ids]
            rows[name] = torch.stack(of_clients)
        if plan.uploads_all:
            usable = {client: updates[client] for client in ids}
            rows |= self._read_off(plan.read_off & needs, usable)
        visible_ids = torch.tensor(ids)
        of_server = deployment.reporter.server(
            needs,
            deployment.state,
            deployment.server_data,
        )
        view = View(
            round_num=self.round_num,
            ids=visible_ids,
            sizes=deployment.sizes[visible_ids],
            reports=rows,
            server=of_server,
            rng=rng.generator(deployment.seed, "select", self.round_num),
        )
        return view, updates

    def _collect(
        self,
        view: View,
        choice: Choice,
        updates: Mapping[int, CheckedUpdate],
    ) -> list[UsedUpdate]:
        """Return the usable updates of the chosen clients, in the order of the choice."""
        plan = self.deployment.plan
        chosen = view.ids[choice.slots].tolist()
        if plan.trains_all and not plan.uploads_all:
            return self._fetch(view, chosen)
        if not plan.trains_all:
            updates = self._train(chosen)
        used = []
        for position, client in enumerate(chosen):
            if client in updates:
                used.append(UsedUpdate(position, client, updates[client]))
        return used

    def _fetch(self, view: View, chosen: Sequence[int]) -> list[UsedUpdate]:
        """Fetch updates from clients that have trained.

        One that cannot upload is replaced, in its position, by the next best of the others.
        """
        fetched: dict[int, UsedUpdate] = {}  # by position in the choice
        tried: set[int] = set()
        to_fetch = dict(enumerate(chosen))  # position -> client
        while to_fetch:
            clients = list(to_fetch.values())
            updates = self.requests.fetch_updates(clients)
            tried |= set(clients)
            empty = []
            for position, client in to_fetch.items():
                if client in updates:
                    fetched[position] = UsedUpdate(position, client, updates[client])
                else:
                    empty.append(position)
            substitutes = self._next_best(view, tried, len(empty))
            to_fetch = dict(zip(empty, substitutes, strict=False))
        return [fetched[position] for position in sorted(fetched)]

    def _train(self, ids: list[int]) -> dict[int, CheckedUpdate]:
        """Let the chosen train and upload, together or each from the result of the last."""
        deployment = self.deployment
        needs = deployment.plan.with_update
        updates: dict[int, CheckedUpdate] = {}
        if deployment.method.schedule == "parallel":
            updates = self.requests.ask_updates(ids, needs)
        else:
            state = deployment.state
            for position, client in enumerate(ids):
                answered = self.requests.ask_updates(
                    [client],
                    needs,
                    start=state,
                    first=position,
                )
                if client in answered:
                    updates[client] = answered[client]
                    state = answered[client].state
        deployment.visits += len(ids)
        return updates

    def _next_best(self, view: View, tried: set[int], count: int) -> list[int]:
        """Return the clients that the method would choose among those not tried yet."""
        untried: list[int] = []
        for slot, client in enumerate(view.ids.tolist()):
            if client not in tried:
                untried.append(slot)
        if not untried or not count:
            return []
        slots = torch.tensor(untried)
        smaller_view = replace(
            view,
            ids=view.ids[slots],
            sizes=view.sizes[slots],
            reports={name: rows[slots] for name, rows in view.reports.items()},
            rng=rng.generator(self.deployment.seed, "select", self.round_num),
        )
        choice = self.deployment.twin().select(smaller_view, count)
        next_best: list[int] = smaller_view.ids[choice.slots].tolist()
        return next_best

    def _aggregate(self, choice: Choice, used: Sequence[UsedUpdate]) -> Outcome:
        """Make the next global model, score it on the proxy set, and return the outcome."""
        deployment = self.deployment
        method = deployment.method
        updates = {chosen.client: chosen.update for chosen in used}  # in the order of the choice
        ids = torch.tensor(list(updates), dtype=torch.long)  # [K]
        reported_sizes = torch.tensor(deployment.clients.typical_sizes())[ids]
        sizes = clipped_sizes(deployment.sizes[ids], deployment.terms.max_share)
        positions = [chosen.position for chosen in used]
        weights = choice.weights_at(positions)
        if weights is None:
            weights = sizes.double() / sizes.sum()
            self._note_clipped(ids, reported_sizes.double() / reported_sizes.sum(), weights)
        elif choice.shares:
            bounded = clipped(weights, deployment.terms.max_share)
            bounded = bounded * (weights.sum() / bounded.sum())
            self._note_clipped(ids, weights, bounded)
            weights = bounded
        reports = self._reports_after(updates)
        if updates:
            starts, states = _stacked(updates)  # [K, d]
            aggregated = Update(
                round_num=self.round_num,
                ids=ids,
                sizes=sizes,
                starts=starts,
                deltas=states - starts,
                weights=weights.float(),
                num_params=deployment.layout.num_params,
                reports=_named(reports, method.aggregator.needs),
            )
            deployment.state = checked_step(
                method.aggregator,
                deployment.state.clone(),
                aggregated,
            )
            if method.aggregator.applied is not None:
                weights = method.aggregator.applied.double()
        self.log.selected = ids.tolist()
        self.log.weights = weights.tolist()
        proxy_x, proxy_y = deployment.problem.proxy
        scores = deployment.evaluator.score(deployment.state, proxy_x, proxy_y)
        reward = deployment.reward.update(scores)
        return Outcome(
            round_num=self.round_num,
            selected=ids,
            reward=reward.total,
            score=reward.score,
            per_class=scores.per_class_f1,
            reward_per_class=reward.per_class,
            weights=weights.float(),
            reports=_named(reports, method.selector.learns_from),
        )

    def _note_clipped(self, ids: Tensor, shares: Tensor, bounded: Tensor) -> None:
        """Name the clients whose share of the round was clipped, by `terms.max_share`."""
        for client, share, used in zip(
            ids.tolist(), shares.tolist(), bounded.tolist(), strict=True
        ):
            if used < share * (1 - 1e-6):
                max_share = self.deployment.terms.max_share
                reason = f"share {share:.3f} clipped to {used:.3f} (terms.max_share={max_share:g})"
                self.log.clip(client, self.deployment.clients.names[client], reason)

    def _reports_after(self, updates: Mapping[int, CheckedUpdate]) -> dict[str, Tensor]:
        """Return the reports about the uploaded models: sent by clients, or computed here."""
        deployment = self.deployment
        plan = deployment.plan
        method = deployment.method
        needs_after = method.selector.learns_from | method.aggregator.needs
        reports = {}
        for name in sorted(plan.with_update):
            rows = [update.reports[name] for update in updates.values()]
            reports[name] = torch.stack(rows) if rows else torch.zeros(0)
        reports |= self._read_off(plan.read_off & needs_after, updates)
        of_server = deployment.reporter.server(
            needs_after,
            deployment.state,
            deployment.server_data,
        )
        return reports | of_server

    def _read_off(
        self,
        names: frozenset[str],
        updates: Mapping[int, CheckedUpdate],
    ) -> dict[str, Tensor]:
        """Compute reports from whole updates, on the server."""
        deployment = self.deployment
        starts = states = deployment.state.new_zeros(0, len(deployment.state))
        if updates:
            starts, states = _stacked(updates)  # [n, d]
        unknown_loss = torch.zeros(len(updates))
        clients = TrainedClients(
            ids=torch.tensor(list(updates), dtype=torch.long),
            starts=starts,
            states=states,
            loss=unknown_loss,
            squared_loss=unknown_loss,
        )
        return deployment.reporter.trained(names, clients, deployment.server_data)


def _stacked(updates: Mapping[int, CheckedUpdate]) -> tuple[Tensor, Tensor]:
    """Return the models before and after training, one row for each update `[n, d]`."""
    starts = []
    states = []
    for update in updates.values():
        starts.append(update.start)
        states.append(update.state)
    return torch.stack(starts), torch.stack(states)


def _named(reports: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """Return the reports of these names that exist."""
    return {name: reports[name] for name in names if name in reports}
