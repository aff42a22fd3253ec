"""What a round costs: bytes up and down, floating-point operations on clients and server.

Every client that trains is charged, and every client that receives the model, whether or not its
update is used in the end. FLOPs of models are counted by PyTorch, per example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedglimpse.federation.reports import CATALOGUE, Sizes

FLOAT_BYTES = 4


@dataclass(frozen=True)
class ModelFlops:
    """Cost of one example through a model."""

    forward: int
    train: int  # forward and backward

    @staticmethod
    def of(model: nn.Module, example: Tensor, classes: int) -> ModelFlops:
        """Count with PyTorch's FLOP counter.

        Args:
            model: left as it was.
            example: two inputs, as the model takes them.  # [2, *shape]
            classes: number of classes, for a loss to run backward from.
        """
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        with FlopCounterMode(display=False) as forward:
            logits = model(example)
        with FlopCounterMode(display=False) as backward:
            target = torch.zeros(len(example), dtype=torch.long, device=example.device)
            F.cross_entropy(logits[:, :classes], target).backward()
        model.load_state_dict(kept)
        model.zero_grad(set_to_none=True)
        per_example = forward.get_total_flops() / len(example)
        both = per_example + backward.get_total_flops() / len(example)
        return ModelFlops(round(per_example), round(both))


@dataclass(frozen=True)
class RoundCost:
    """One round of one lane."""

    uplink_bytes: int
    downlink_bytes: int
    client_flops: int
    server_flops: int


@dataclass(frozen=True)
class Activity:
    """What happened in a round, in counts."""

    needs: frozenset[str]  # asked of every visible client
    needs_after: frozenset[str]  # asked of the chosen clients, with their upload
    visible: int  # clients
    visible_examples: int
    trained: int
    trained_examples: int
    chosen: int
    chosen_examples: int
    selector_flops: int = 0  # what the method says it computed on the server
    taught: bool = False  # clients distil: the received model runs beside their own


@dataclass(frozen=True)
class CostModel:
    """Turns what a round did into what it cost."""

    flops: ModelFlops
    sizes: Sizes
    epochs: int

    def round(self, act: Activity) -> RoundCost:
        """Return the cost of a round."""
        size, example = self.sizes, self.flops.forward
        groups = [(act.needs, act.visible, act.visible_examples)]
        after = frozenset(n for n in act.needs_after if not CATALOGUE[n].from_upload)
        groups.append((after - act.needs, act.chosen, act.chosen_examples))
        uploads = act.chosen
        up = down = passes = server = 0.0
        for names, clients, examples in groups:
            for need in (CATALOGUE[n] for n in names):
                up += clients * need.up(size)
                down += clients * need.down(size)
                passes += examples * need.client_passes
                passes += clients * size.proxy * need.client_proxy_passes
                server += size.proxy * (need.server_passes + clients * need.server_passes_each)
                uploads = max(uploads, clients if need.uploads_model else 0)
        probed = any(CATALOGUE[n].phase == "probe" and not CATALOGUE[n].oracle for n in act.needs)
        receivers = max(act.trained, act.visible if probed else 0)
        each = self.flops.train + (self.flops.forward if act.taught else 0)
        training = act.trained_examples * self.epochs * each
        return RoundCost(
            uplink_bytes=round(FLOAT_BYTES * (uploads * size.state + up)),
            downlink_bytes=round(FLOAT_BYTES * (receivers * size.state + down)),
            client_flops=round(training + passes * example),
            server_flops=round(2 * act.chosen * size.state + server * example) + act.selector_flops,
        )
