"""The local trainings of a round: who trains from which state, on which rows.

`launch` starts the trainings of a round in one call of the trainer; on a GPU they run while the
server does something else, until `RunningTraining.wait`. The chains of sequential methods are run
stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.data.population import Population
from fedglimpse.simulation.lane import Lane, TrainedClients
from fedglimpse.simulation.plugin_checks import checked_starts
from fedglimpse.simulation.trainers.jobs import (
    LocalTrainer,
    TrainingJobs,
    TrainingResults,
)


@dataclass(frozen=True)
class ClientGroup:
    """Clients of one lane that train at the same time."""

    r: int  # position of the lane
    ids: Tensor  # [n]
    starts: Tensor  # [n, d], with stride 0 where all start from the same state
    stage: int = 0  # position of the first of them in the order of the lane's clients


@dataclass(frozen=True)
class RunningTraining:
    """Trainings that were launched; on a GPU they may still be running."""

    groups: Sequence[ClientGroup]
    results: TrainingResults | None  # None: nobody trains

    def wait(self) -> dict[int, TrainedClients]:
        """Wait for the trainings; returns, by lane, the clients whose update is finite."""
        if self.results is None:
            return {}
        states = self.results.states
        least, most = torch.aminmax(states, dim=1)  # [J]; NaN where any float is NaN
        numbers = torch.stack([least, most, self.results.loss, self.results.squared_loss]).cpu()
        is_finite = numbers[:2].isfinite().all(dim=0)  # [J]
        all_finite = bool(is_finite.all())
        trained = {}
        first = 0
        for group in self.groups:
            last = first + group.ids.shape[0]
            jobs = slice(first, last)
            first = last
            clients = TrainedClients(
                ids=group.ids,
                starts=group.starts,
                states=states[jobs],
                loss=numbers[2, jobs],
                squared_loss=numbers[3, jobs],
            )
            if not all_finite:
                finite_slots = is_finite[jobs].nonzero().flatten()
                clients = clients.pick(finite_slots)
            trained[group.r] = clients
        return trained


def launch(
    trainer: LocalTrainer,
    lanes: Sequence[Lane],
    states: Tensor,
    ids_by_lane: Mapping[int, Tensor],
    client_rows: ClientRows,
) -> RunningTraining:
    """Start to train clients of every lane in which some shall train.

    Of a parallel lane these are all of them, from where its aggregator says; of a sequential lane
    the first one, from the global model (`train_in_turn` has the others).

    Args:
        trainer: runs the trainings.
        lanes: all lanes.
        states: their global states; aggregators may keep what they are given.  # [R, d]
        ids_by_lane: ids of the clients that shall train.
        client_rows: the rows that clients hold.
    """
    groups: list[ClientGroup] = []
    for r, ids in ids_by_lane.items():
        method = lanes[r].method
        if method.schedule == "sequential":
            starts = states[r].expand(1, -1)
            groups.append(ClientGroup(r, ids[:1], starts))
        else:
            starts = checked_starts(method.aggregator, states[r], ids)
            groups.append(ClientGroup(r, ids, starts))
    return _launch_groups(trainer, lanes, groups, client_rows)


def train_in_turn(
    trainer: LocalTrainer,
    lanes: Sequence[Lane],
    states: Tensor,
    ids_by_lane: Mapping[int, Tensor],
    first: Mapping[int, TrainedClients],
    client_rows: ClientRows,
) -> dict[int, TrainedClients]:
    """Train the clients of sequential lanes after the first; returns all with a finite update.

    They train in the order of their ids, each from the last finite result. The i-th clients of all
    lanes train together.

    Args:
        trainer: runs the trainings.
        lanes: all lanes.
        states: their global states, where a chain without a finite result still is.  # [R, d]
        ids_by_lane: ids of all clients that train in this round; parallel lanes are ignored.
        first: the results of `launch`, without clients whose update is not finite.
        client_rows: the rows that clients hold.
    """
    links: dict[int, list[TrainedClients]] = {}  # one client each
    heads: dict[int, Tensor] = {}  # where the next client of each chain starts
    longest = 0
    for r, ids in ids_by_lane.items():
        if lanes[r].method.schedule == "sequential":
            links[r] = [first[r]]
            heads[r] = states[r]
            if len(first[r].ids):
                heads[r] = first[r].states[-1]
            longest = max(longest, len(ids))
    for stage in range(1, longest):
        groups: list[ClientGroup] = []
        for r in links:
            ids = ids_by_lane[r]
            if stage < len(ids):
                group = ClientGroup(
                    r,
                    ids=ids[stage : stage + 1],
                    starts=heads[r].expand(1, -1),
                    stage=stage,
                )
                groups.append(group)
        training = _launch_groups(trainer, lanes, groups, client_rows)
        for r, clients in training.wait().items():
            links[r].append(clients)
            if len(clients.ids):
                heads[r] = clients.states[-1]
    trained: dict[int, TrainedClients] = {}
    for r, clients_in_order in links.items():
        trained[r] = TrainedClients.joined(clients_in_order)
    return trained


def _launch_groups(
    trainer: LocalTrainer,
    lanes: Sequence[Lane],
    groups: Sequence[ClientGroup],
    client_rows: ClientRows,
) -> RunningTraining:
    """Start to train some groups of clients, at least one, all in one call of the trainer."""
    start_states: list[Tensor] = []
    num_states = 0  # S so far
    start_rows: list[int] = []
    keys: list[int] = []
    sizes: list[int] = []
    visits: list[int] = []
    numbers: list[tuple[float, ...]] = []  # of each job's objective
    clients: list[tuple[Population, list[int]]] = []
    for group in groups:
        lane = lanes[group.r]
        goal = lane.method.objective
        ids = group.ids.tolist()
        clients.append((lane.population, ids))
        sizes += lane.population.sizes[group.ids].tolist()
        one_start = group.starts.stride(0) == 0  # one row serves all
        start_states.append(group.starts[:1] if one_start else group.starts)
        for i, client in enumerate(ids):
            start_rows.append(num_states if one_start else num_states + i)
            keys.append(rng.key(lane.seed, "train", lane.round_num, client))
            visits.append(lane.visits + group.stage + i if goal.block_cycle else -1)
        num_states += len(start_states[-1])
        job_numbers = (goal.proximal_mu, goal.proximal_squared, goal.distill, goal.temperature)
        numbers += [job_numbers] * len(ids)
    # One transfer for each type; through NumPy, since torch.tensor is slow on lists.
    start = torch.cat(start_states)  # [S, d]
    integer_table = np.array([start_rows, keys, sizes, visits], dtype=np.int64)
    integers = torch.from_numpy(integer_table).to(start.device, non_blocking=True)  # [4, J]
    float_table = np.array(numbers, dtype=np.float32).T.copy()
    floats = torch.from_numpy(float_table).to(start.device, non_blocking=True)  # [4, J]
    jobs = TrainingJobs(
        start=integers[0],
        keys=integers[1],
        rows=client_rows.take(clients, integers[2], max(sizes)),
        sizes=integers[2],
        mu=floats[0],
        squared=floats[1].bool(),
        distill=floats[2],
        temperature=floats[3],
        visit=integers[3],
        objectives=[lanes[group.r].method.objective for group in groups],
    )
    return RunningTraining(groups, trainer.train(start, jobs))


class ClientRows:
    """Which rows of the training set each client holds, as one long table where they train.

    The jobs of a round are cut out of the table without a transfer. `Population.take` is the
    readable twin. Clients of a virtual population draw their rows when they are seen, so these
    populations have no table.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._rows = torch.zeros(0, dtype=torch.long)  # of all clients of all populations
        # By identity of the population, which is kept alive: where the rows of each client begin.
        self._begins: dict[int, tuple[Population, list[int]]] = {}

    def hold(self, populations: Sequence[Population], device: torch.device) -> None:
        """Hold the rows of all these populations; of no others, where some of them are new.

        Args:
            populations: of all lanes.
            device: where they train.
        """
        with_table: list[Population] = []
        for population in populations:
            if isinstance(population.rows, tuple):
                with_table.append(population)
        if all(id(population) in self._begins for population in with_table):
            return
        self._begins.clear()
        rows: list[Tensor] = []
        count = 0
        longest = 0
        for population in with_table:
            if id(population) in self._begins:
                continue
            begins: list[int] = []
            for client_rows in population.rows:
                begins.append(count)
                rows.append(client_rows)
                count += len(client_rows)
                longest = max(longest, len(client_rows))
            self._begins[id(population)] = (population, begins)
        rows.append(torch.zeros(longest, dtype=torch.long))  # nothing is read beyond the end
        self._rows = torch.cat(rows).to(device)

    def take(
        self, clients: Sequence[tuple[Population, Sequence[int]]], sizes: Tensor, width: int
    ) -> Tensor:
        """Return the rows of some clients, padded with 0 `[J, n]`.

        Args:
            clients: of each population, their ids.
            sizes: how many rows each of the clients has; on the device of the result.  # [J]
            width: n, the largest of the sizes.
        """
        if not all(id(population) in self._begins for population, _ in clients):
            rows: list[Tensor] = []
            for population, ids in clients:
                for client in ids:
                    rows.append(population.rows[client])
            return pad_sequence(rows, batch_first=True).to(sizes.device)
        first_rows: list[int] = []
        for population, ids in clients:
            begins = self._begins[id(population)][1]
            first_rows += [begins[client] for client in ids]
        first_cells = torch.from_numpy(np.array(first_rows, dtype=np.int64))
        first_cells = first_cells.to(sizes.device, non_blocking=True)
        columns = torch.arange(width, device=sizes.device)
        rows_of_clients = self._rows[first_cells[:, None] + columns]  # [J, n]
        is_padding = columns >= sizes[:, None]
        return rows_of_clients.masked_fill(is_padding, 0)
