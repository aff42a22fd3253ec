"""The merges of a round: on a GPU, lanes that merge in the same way do it in one pass.

`Aggregator.step` is the readable twin, and what all other lanes do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.federation.aggregation import batch_key, step_lanes
from fedglimpse.federation.devices import apart
from fedglimpse.simulation.lane import Lane, Upload, kind_of
from fedglimpse.simulation.trained_clients import deltas_of
from fedglimpse.simulation.transfer import sent
from fedglimpse.types import Aggregator, Update

FLOATS = 2**27  # of client states in one pass, half a GiB


def merge(
    lanes: Sequence[Lane], states: Tensor, uploads: Mapping[int, Upload], num_params: int
) -> None:
    """Make the next global models.

    Args:
        lanes: all lanes.
        states: their global states, replaced where something was uploaded.  # [R, d]
        uploads: lane -> what its chosen clients sent, at least one of them.
        num_params: the first floats of a state are parameters, the rest are buffers.
    """
    alike: dict[Hashable, list[int]] = {}
    for r, upload in uploads.items():
        key = batch_key(lanes[r].method.aggregator)
        if key is None or apart(states.device):
            step_alone(lanes[r], states[r], upload, num_params)
        else:
            alike.setdefault((key, len(upload.weights)), []).append(r)
    for places in alike.values():
        room = max(FLOATS // uploads[places[0]].clients.states.numel(), 1)
        for some in (places[i : i + room] for i in range(0, len(places), room)):
            aggregators = [lanes[r].method.aggregator for r in some]
            own = torch.stack([states[r] for r in some])
            states[some] = step_together(aggregators, own, [uploads[r] for r in some], num_params)


def step_alone(lane: Lane, state: Tensor, upload: Upload, num_params: int) -> None:
    """Make the next global model of one lane, in the place of `state` `[d]`."""
    aggregator, clients = lane.method.aggregator, upload.clients
    update = Update(
        round_num=lane.round_num,
        ids=clients.ids,
        sizes=upload.sizes,
        starts=clients.starts,
        deltas=clients.deltas,
        weights=upload.weights.to(state),
        num_params=num_params,
        reports={n: v for n, v in upload.reports.items() if n in aggregator.needs},
    )
    state.copy_(stepped(aggregator, state.clone(), update))
    if aggregator.applied is not None:
        upload.weights = aggregator.applied.cpu().double()


def stepped(aggregator: Aggregator, state: Tensor, update: Update) -> Tensor:
    """Let an aggregator step; returns the next global state `[d]`, UserError for anything else."""
    new: object = aggregator.step(state, update)
    name = type(aggregator).__name__
    if not isinstance(new, Tensor) or new.shape != state.shape or not new.is_floating_point():
        raise UserError(
            f"{name}.step answered round {update.round_num} with {kind_of(new)}: return the next "
            f"global state, a tensor of {len(state)} floats as it was given."
        )
    own = not type(aggregator).__module__.startswith("fedglimpse.")  # of ours, updates are checked
    if own and not bool(new.isfinite().all()):
        raise UserError(
            f"{name}.step answered round {update.round_num} with numbers that are not finite: mend "
            "step()."
        )
    applied: object = aggregator.applied
    count = len(update.weights)
    if applied is not None and not (isinstance(applied, Tensor) and applied.shape == (count,)):
        raise UserError(
            f"{name}.applied is {kind_of(applied)} after round {update.round_num}: make it a "
            f"tensor of the {count} weights that were used, or None."
        )
    return new


def step_together(
    aggregators: Sequence[Aggregator], states: Tensor, uploads: Sequence[Upload], num_params: int
) -> Tensor:
    """Let aggregators with the same `batch_key` step; returns the next global states `[R, d]`.

    Args:
        aggregators: of R lanes.
        states: their global states; aggregators keep them.  # [R, d]
        uploads: of as many clients in every lane.
        num_params: as in `merge`.
    """
    deltas = deltas_of([upload.clients for upload in uploads]).unflatten(0, (len(uploads), -1))
    weights = torch.stack([upload.weights for upload in uploads]).to(states.dtype)
    update = Update(
        round_num=-1,  # every lane counts its own
        ids=torch.stack([upload.clients.ids for upload in uploads]),
        sizes=torch.stack([upload.sizes for upload in uploads]),
        starts=states[:, None],
        deltas=deltas,
        weights=sent(weights, states.device),
        num_params=num_params,
        reports={},
    )
    return step_lanes(aggregators, states, update)
