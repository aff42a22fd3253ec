"""The local trainings of a round: who starts from what, in which order, and what came of it.

Which rows of the training set the clients of all lanes hold, kept where they train.

A round's jobs are cut out of one long list on the device. `Population.take` is the readable twin,
and what clients get whose rows are drawn when they are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.simulation.lane import Lane
from fedglimpse.simulation.trained_clients import TrainedClients
from fedglimpse.simulation.trainers.jobs import JobsSummary, LocalTrainer, TrainingJobs
from fedglimpse.simulation.transfer import sent
from fedglimpse.types import Aggregator, LocalObjective


@dataclass(frozen=True)
class Finished:
    """What came of one lane's trainings."""

    clients: TrainedClients  # those whose result is finite
    kept: list[int]  # their positions among the ids that were asked for
    rejected: list[int]  # ids of the others


@dataclass(frozen=True)
class _Task:
    """Clients of one lane that train at the same time."""

    r: int  # the lane
    ids: Tensor  # [n]
    starts: Tensor  # [n, d], with stride 0 where all start from the same state
    first: int  # position in the round of the first of them


def train_round(
    trainer: LocalTrainer,
    lanes: Sequence[Lane],
    states: Tensor,
    ids_of: Mapping[int, Tensor],
    holdings: Holdings,
    meanwhile: Callable[[], None] | None = None,
) -> dict[int, Finished]:
    """Train some clients of some lanes, as many as possible at once.

    Clients of a parallel lane start where its aggregator says. Those of a sequential lane train
    one after the other in the order of their ids' list, each from the last finite result, the
    first from the global state; the i-th clients of all sequential lanes train together.

    Args:
        trainer: runs the trainings.
        lanes: all lanes.
        states: their global states.  # [R, d]
        ids_of: lane -> ids of the clients that train.
        holdings: the rows that clients hold.
        meanwhile: called once, on a GPU while the first of them train.
    """
    holdings.keep([lane.population for lane in lanes], states.device)
    parallel = [r for r in ids_of if lanes[r].method.schedule == "parallel"]
    own = states.clone().unbind()  # [d] each: aggregators may keep what they are given
    tasks = [
        _Task(r, ids_of[r], starts_of(lanes[r].method.aggregator, own[r], ids_of[r]), 0)
        for r in parallel
    ]
    heads = {r: own[r] for r in ids_of if r not in parallel}  # where each chain stands
    parts: dict[int, list[Finished]] = {r: [] for r in ids_of}
    for stage in range(max([1, *(len(ids_of[r]) for r in heads)])):
        for r, head in heads.items():
            ids = ids_of[r][stage : stage + 1]
            tasks.append(_Task(r, ids, head.expand(len(ids), -1), stage))
        some = [task for task in tasks if task.ids.shape[0]]
        for task, done in _run(trainer, lanes, some, holdings, meanwhile):
            parts[task.r].append(done)
            if task.r in heads and done.kept:
                heads[task.r] = done.clients.states[-1]
        tasks, meanwhile = [], None
    return {r: _joined(some) for r, some in parts.items() if some}


def starts_of(aggregator: Aggregator, state: Tensor, ids: Tensor) -> Tensor:
    """Ask an aggregator what these clients train from `[n, d]`; UserError where it is no answer."""
    starts = aggregator.starts(state, ids)
    if starts.shape != (ids.shape[0], state.shape[0]):
        raise UserError(
            f"{type(aggregator).__name__}.starts returned shape {tuple(starts.shape)}: "
            f"return one state of {len(state)} floats for each of the {len(ids)} clients."
        )
    return starts


def _run(
    trainer: LocalTrainer,
    lanes: Sequence[Lane],
    tasks: Sequence[_Task],
    holdings: Holdings,
    meanwhile: Callable[[], None] | None,
) -> list[tuple[_Task, Finished]]:
    """Run tasks in one call of the trainer and keep the finite results."""
    trained = trainer.train(*_table(lanes, tasks, holdings)) if tasks else None
    if meanwhile is not None:  # a GPU has been told what to do, and nothing has been waited for
        meanwhile()
    if trained is None:
        return []
    least, most = torch.aminmax(trained.states, dim=1)  # [J]; NaN where any float is
    home = torch.stack([least, most, trained.loss, trained.squared_loss]).cpu()
    finite = home[:2].isfinite().all(dim=0).tolist()
    counts = [task.ids.shape[0] for task in tasks]
    parts = (some.split(counts) for some in (trained.states, home[2], home[3]))
    answers, at = [], 0
    for task, count, states, loss, squared_loss in zip(tasks, counts, *parts, strict=True):
        fine = finite[at : at + count]
        at += count
        clients = TrainedClients(task.ids, task.starts, states, loss, squared_loss)
        places, rejected = list(range(count)), []
        if not all(fine):
            places = [i for i in places if fine[i]]
            rejected = [i for i, ok in zip(task.ids.tolist(), fine, strict=True) if not ok]
            clients = clients.pick(torch.tensor(places, dtype=torch.long))
        answers.append((task, Finished(clients, [task.first + i for i in places], rejected)))
    return answers


def _table(
    lanes: Sequence[Lane], tasks: Sequence[_Task], holdings: Holdings
) -> tuple[Tensor, TrainingJobs]:
    """Return the start states `[S, d]` and the jobs of some tasks."""
    start, index, keys, sizes, visits, clients, wishes = [], [], [], [], [], [], []
    count = 0  # rows of `start`
    for task in tasks:
        lane, objective = lanes[task.r], lanes[task.r].method.objective
        ids, shared = task.ids.tolist(), task.starts.stride(0) == 0
        start.append(task.starts[:1] if shared else task.starts)
        index += [count + (0 if shared else i) for i in range(len(ids))]
        count += 1 if shared else len(ids)
        keys += rng.keys(lane.seed, "train", lane.round_num, ids)
        sizes += holdings.sizes(lane.population, ids)
        visit = lane.visits + task.first
        visits += [visit + i if objective.block_cycle else -1 for i in range(len(ids))]
        clients.append(ids)
        wishes.append(_wishes(objective))
    states, populations = torch.cat(start), [lanes[task.r].population for task in tasks]
    numbers = np.array([index, keys, sizes, visits], dtype=np.int64)  # torch.tensor is slow here
    whole = sent(torch.from_numpy(numbers), states.device)  # [4, J] in one transfer
    each = np.array(wishes, dtype=np.float32).T.repeat([len(ids) for ids in clients], axis=1)
    real = sent(torch.from_numpy(each), states.device)  # [4, J]
    return states, TrainingJobs(
        start=whole[0],
        keys=whole[1],
        rows=holdings.take(populations, clients, whole[2], max(sizes)),
        sizes=whole[2],
        mu=real[0],
        squared=real[1].bool(),
        distill=real[2],
        temperature=real[3],
        visit=whole[3],
        precomputed=JobsSummary(
            most_rows=max(sizes),
            any_proximal=any(mu > 0 for mu, *_ in wishes),
            all_squared=all(squared for _, squared, *_ in wishes),
            any_special=max(visits) >= 0 or any(distill > 0 for _, _, distill, _ in wishes),
        ),
    )


def _wishes(objective: LocalObjective) -> tuple[float, float, float, float]:
    """Return what a job minimises, as numbers."""
    squared = float(objective.proximal_squared)
    return objective.proximal_mu, squared, objective.distill, objective.temperature


def _joined(parts: Sequence[Finished]) -> Finished:
    """Put the links of a chain together."""
    if len(parts) == 1:
        return parts[0]
    fields = zip(*(vars(part.clients).values() for part in parts), strict=True)
    return Finished(
        clients=TrainedClients(*(torch.cat(values) for values in fields)),
        kept=[i for part in parts for i in part.kept],
        rejected=[i for part in parts for i in part.rejected],
    )


def mean_losses(losses: Sequence[Tensor]) -> list[float | None]:
    """Return the mean of every row `[n]`, None where it is empty; rows of one length at once."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(losses):
        by_length.setdefault(row.shape[0], []).append(i)
    means: list[float | None] = [None] * len(losses)
    for length, places in by_length.items():
        found = torch.stack([losses[i] for i in places]).mean(1).tolist() if length else []
        for i, mean in zip(places, found, strict=False):
            means[i] = mean
    return means


class Holdings:
    """The rows of all clients of some populations, one after the other."""

    def __init__(self) -> None:
        """Start with nobody."""
        # by identity; where the rows of each client begin, and where those of the last end
        self._known: dict[int, tuple[Population, list[int]]] = {}
        self._rows = torch.zeros(0, dtype=torch.long)

    def keep(self, populations: Sequence[Population], device: torch.device) -> None:
        """Hold the rows of all these populations, and of no others where some are new.

        Args:
            populations: of all lanes; those whose clients draw their rows are left out.
            device: where they train.
        """
        if all(id(one) in self._known or not _dealt(one) for one in populations):
            return
        self._known.clear()
        rows: list[Tensor] = []
        count = longest = 0
        for population in {id(one): one for one in populations if _dealt(one)}.values():
            begins = [count]
            for own in population.rows:
                rows.append(own)
                count, longest = count + len(own), max(longest, len(own))
                begins.append(count)
            self._known[id(population)] = population, begins
        rows.append(torch.zeros(longest, dtype=torch.long))  # nothing is read beyond the end
        self._rows = torch.cat(rows).to(device)

    def sizes(self, population: Population, clients: Sequence[int]) -> list[int]:
        """Return how many rows some clients of a kept population hold."""
        if not _dealt(population):
            return population.sizes[list(clients)].tolist()
        begins = self._known[id(population)][1]
        return [begins[i + 1] - begins[i] for i in clients]

    def take(
        self,
        populations: Sequence[Population],
        clients: Sequence[Sequence[int]],
        sizes: Tensor,
        width: int,
    ) -> Tensor:
        """Return the rows of some clients of every population, padded with 0 `[J, n]`.

        Args:
            populations: some of those that are kept.
            clients: ids, for each of the populations.
            sizes: how many rows each of the clients holds; the table is made where this is.  # [J]
            width: n, the largest of the sizes.
        """
        pairs = list(zip(populations, clients, strict=True))
        if not all(map(_dealt, populations)):
            rows = [population.rows[i] for population, ids in pairs for i in ids]
            return pad_sequence(rows, batch_first=True).to(sizes.device)
        places = [(self._known[id(population)][1], ids) for population, ids in pairs]
        firsts = np.array([begin[i] for begin, ids in places for i in ids], dtype=np.int64)
        columns = torch.arange(width, device=sizes.device)
        cells = sent(torch.from_numpy(firsts), sizes.device)[:, None] + columns  # [J, n]
        return self._rows[cells].masked_fill(columns >= sizes[:, None], 0)


def _dealt(population: Population) -> bool:
    """True where clients hold their rows from the start, not drawn when they are seen."""
    return isinstance(population.rows, tuple)
