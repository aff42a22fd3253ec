"""What a round costs: bytes up and down, floating-point operations on clients and server.

Every client that trains is charged, and every client that receives the model, whether or not its
update is used in the end. FLOPs of models are counted by PyTorch, per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedglimpse.federation.reports import CATALOGUE, Sizes
from fedglimpse.types import Method

FLOAT_BYTES = 4


class _FlopCounter(TorchDispatchMode):
    """Counts what PyTorch's `FlopCounterMode` counts, without importing torch._dynamo (0.8 s)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first operation would import torch._dynamo, to be skipped by it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and add its FLOPs."""
        options = kwargs or {}
        result = func(*args, **options)
        operation = getattr(func, "_overloadpacket", func)
        formula: Callable[..., int] | None = flop_registry.get(operation)
        if formula is not None:
            self.total += formula(*args, **options, out_val=result)
        return result


@dataclass(frozen=True)
class ModelFlops:
    """Cost of one example through a model."""

    forward: int
    train: int  # forward and backward

    @staticmethod
    def of(model: nn.Module, example: Tensor, classes: int) -> ModelFlops:
        """Count with PyTorch's formulas.

        Args:
            model: left as it was.
            example: two inputs, as the model takes them.  # [2, *shape]
            classes: number of classes, for a loss to run backward from.
        """
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with _FlopCounter() as forward:
            logits = model(example)
        with _FlopCounter() as backward:
            target = torch.zeros(len(example), dtype=torch.long, device=example.device)
            F.cross_entropy(logits[:, :classes], target).backward()
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        forward_flops = forward.total / len(example)
        backward_flops = backward.total / len(example)
        return ModelFlops(round(forward_flops), round(forward_flops + backward_flops))


@dataclass(frozen=True)
class RoundCost:
    """One round of one lane."""

    uplink_bytes: int
    downlink_bytes: int
    client_flops: int
    server_flops: int


@dataclass
class _ReportCost:
    """What reports cost in a round, besides the models that travel."""

    floats_up: float = 0
    floats_down: float = 0
    client_examples: float = 0  # forward passes on clients
    server_examples: float = 0  # forward passes on the server
    receivers: int = 0  # clients that need the model for a report before training
    uploads: int = 0  # clients that upload their model for a report


@dataclass(frozen=True)
class CostModel:
    """Turns what happened in a round into its cost."""

    flops: ModelFlops
    sizes: Sizes
    epochs: int

    def round(
        self,
        method: Method,
        examples: Mapping[int, int],
        trained: Sequence[int],
        selected: Sequence[int],
        has_choice: bool,
        selector_flops: int = 0,
    ) -> RoundCost:
        """Return the cost of a round; one without a choice and a training asks nothing of anyone.

        Args:
            method: asks for reports, and says what clients train.
            examples: local examples of every visible client, by id.
            trained: ids of the clients that trained.
            selected: ids of the clients whose update is used.
            has_choice: the method has chosen among the visible clients.
            selector_flops: what the method reports of its work on the server.
        """
        reports = _ReportCost()
        needs = method.selector.needs
        if has_choice or trained:
            visible_examples = sum(examples.values())
            for name in needs:
                self._add_report(reports, name, len(examples), visible_examples)
        if has_choice:
            selected_examples = sum(examples[client] for client in selected)
            needs_after = method.selector.learns_from | method.aggregator.needs
            for name in needs_after - needs:
                if not CATALOGUE[name].from_upload:
                    self._add_report(reports, name, len(selected), selected_examples)

        state = self.sizes.state
        uploads = max(len(selected), reports.uploads)
        receivers = max(len(trained), reports.receivers)
        flops_per_example = self.flops.train
        if method.objective.distill > 0:  # clients run the received model beside their own
            flops_per_example += self.flops.forward
        trained_examples = sum(examples[client] for client in trained)
        training = trained_examples * self.epochs * flops_per_example
        client_passes = reports.client_examples * self.flops.forward
        server_passes = reports.server_examples * self.flops.forward
        aggregation = 2 * len(selected) * state
        return RoundCost(
            uplink_bytes=round(FLOAT_BYTES * (uploads * state + reports.floats_up)),
            downlink_bytes=round(FLOAT_BYTES * (receivers * state + reports.floats_down)),
            client_flops=round(training + client_passes),
            server_flops=round(aggregation + server_passes) + selector_flops,
        )

    def _add_report(self, cost: _ReportCost, name: str, clients: int, examples: int) -> None:
        """Add what one report of so many clients, with so many examples together, costs."""
        need = CATALOGUE[name]
        proxy = self.sizes.proxy
        cost.floats_up += clients * need.up(self.sizes)
        cost.floats_down += clients * need.down(self.sizes)
        cost.client_examples += examples * need.client_passes
        cost.client_examples += clients * proxy * need.client_proxy_passes
        cost.server_examples += proxy * (need.server_passes + clients * need.server_passes_each)
        if need.phase == "probe" and not need.oracle:
            cost.receivers = max(cost.receivers, clients)
        if need.uploads_model:
            cost.uploads = max(cost.uploads, clients)
