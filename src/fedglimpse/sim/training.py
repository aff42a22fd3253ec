"""The local trainings of a round: who starts from what, in which order, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.errors import UserError
from fedglimpse.sim.jobs import Jobs, LocalTrainer
from fedglimpse.sim.lane import Lane
from fedglimpse.sim.reports import TrainedClients
from fedglimpse.types import LocalObjective


@dataclass(frozen=True)
class Finished:
    """What came of one lane's trainings."""

    clients: TrainedClients  # those whose result is finite
    kept: Tensor  # [V] their positions among the ids that were asked for
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
    """
    parallel = [r for r in ids_of if lanes[r].method.schedule == "parallel"]
    own = states.clone().unbind()  # [d] each: aggregators may keep what they are given
    tasks = [_Task(r, ids_of[r], _starts(lanes[r], own[r], ids_of[r]), 0) for r in parallel]
    heads = {r: own[r] for r in ids_of if r not in parallel}  # where each chain stands
    parts: dict[int, list[Finished]] = {r: [] for r in ids_of}
    for stage in range(max([1, *(len(ids_of[r]) for r in heads)])):
        for r, head in heads.items():
            ids = ids_of[r][stage : stage + 1]
            tasks.append(_Task(r, ids, head.expand(len(ids), -1), stage))
        for task, done in _run(trainer, lanes, [t for t in tasks if len(t.ids)]):
            parts[task.r].append(done)
            if task.r in heads and len(done.kept):
                heads[task.r] = done.clients.states[-1]
        tasks = []
    return {r: _joined(some) for r, some in parts.items() if some}


def _starts(lane: Lane, state: Tensor, ids: Tensor) -> Tensor:
    """Ask a lane's aggregator what these clients train from `[n, d]`."""
    starts = lane.method.aggregator.starts(state, ids)
    if starts.shape != (len(ids), len(state)):
        raise UserError(
            f"{type(lane.method.aggregator).__name__}.starts returned shape {tuple(starts.shape)}: "
            f"return one state of {len(state)} floats for each of the {len(ids)} clients."
        )
    return starts


def _run(
    trainer: LocalTrainer, lanes: Sequence[Lane], tasks: Sequence[_Task]
) -> list[tuple[_Task, Finished]]:
    """Run tasks in one call of the trainer and keep the finite results."""
    if not tasks:
        return []
    start, jobs = _table(lanes, tasks)
    trained = trainer.train(start, jobs)
    least, most = torch.aminmax(trained.states, dim=1)  # [J]; NaN where any float is
    home = torch.stack([least, most, trained.loss, trained.squared_loss]).cpu()
    finite, losses = home[:2].isfinite().all(dim=0).tolist(), home[2:]
    counts = [len(task.ids) for task in tasks]
    parts = zip(tasks, trained.states.split(counts), losses.split(counts, dim=1), strict=True)
    answers, at = [], 0
    for task, states, (loss, squared_loss) in parts:
        ids, fine = task.ids.tolist(), finite[at : at + len(task.ids)]
        at += len(ids)
        clients = TrainedClients(task.ids, task.starts, states, loss, squared_loss)
        kept = torch.tensor([i for i, ok in enumerate(fine) if ok], dtype=torch.long)
        if not all(fine):
            clients = clients.pick(kept)
        rejected = [client for client, ok in zip(ids, fine, strict=True) if not ok]
        answers.append((task, Finished(clients, kept + task.first, rejected)))
    return answers


def _table(lanes: Sequence[Lane], tasks: Sequence[_Task]) -> tuple[Tensor, Jobs]:
    """Return the start states `[S, d]` and the jobs of some tasks."""
    start, index, keys, visits, rows, wishes = [], [], [], [], [], []
    count = 0  # rows of `start`
    for task in tasks:
        lane, objective = lanes[task.r], lanes[task.r].method.objective
        ids, shared = task.ids.tolist(), task.starts.stride(0) == 0
        start.append(task.starts[:1] if shared else task.starts)
        index += [count + (0 if shared else i) for i in range(len(ids))]
        count += len(start[-1])
        keys += [rng.key(lane.seed, "train", lane.round_num, i) for i in ids]
        visit = lane.round_num * lane.k + task.first
        visits += [visit + i if objective.block_cycle else -1 for i in range(len(ids))]
        wishes += [_wishes(objective)] * len(ids)
        rows += [lane.population.rows[i] for i in ids]
    states, sizes = torch.cat(start), [own.numel() for own in rows]
    whole = torch.tensor([index, keys, sizes, visits]).to(states.device)  # [4, J] in one transfer
    real = torch.tensor(list(zip(*wishes, strict=True))).to(states.device)  # [4, J]
    return states, Jobs(
        start=whole[0],
        keys=whole[1],
        rows=pad_sequence(rows, batch_first=True).to(states.device),
        sizes=whole[2],
        mu=real[0],
        squared=real[1].bool(),
        distill=real[2],
        temperature=real[3],
        visit=whole[3],
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
        kept=torch.cat([part.kept for part in parts]),
        rejected=[i for part in parts for i in part.rejected],
    )
