"""What a round costs: bytes up and down, floating-point operations on clients and server.

Every client that trains is charged, and every client that receives the model, whether or not its
update is used in the end. FLOPs of models are counted by PyTorch, per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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


class _ReportPrice(NamedTuple):
    """What a set of reports costs, besides the models that travel."""

    floats_up: int  # for each client that reports
    floats_down: int
    client_passes: float  # over the local examples of a client
    client_examples: float  # of the proxy set, for each client on its device
    server_examples: float  # once for all clients
    server_examples_each: float  # for each client
    needs_model: bool  # each client has to receive the model, before it trains
    uploads_model: bool  # each client has to upload its model


@cache
def _report_price(names: frozenset[str], sizes: Sizes) -> _ReportPrice:
    """Add up what reports cost: the same in every round."""
    needs = [CATALOGUE[name] for name in names]
    return _ReportPrice(
        floats_up=sum(need.up(sizes) for need in needs),
        floats_down=sum(need.down(sizes) for need in needs),
        client_passes=sum(need.client_passes for need in needs),
        client_examples=sizes.proxy * sum(need.client_proxy_passes for need in needs),
        server_examples=sizes.proxy * sum(need.server_passes for need in needs),
        server_examples_each=sizes.proxy * sum(need.server_passes_each for need in needs),
        needs_model=any(need.phase == "probe" and not need.oracle for need in needs),
        uploads_model=any(need.uploads_model for need in needs),
    )


@cache
def _sent_later(method_needs: frozenset[str], needs_after: frozenset[str]) -> frozenset[str]:
    """Return the reports that the chosen clients send besides their upload."""
    later = needs_after - method_needs
    return frozenset(name for name in later if not CATALOGUE[name].from_upload)


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
        needs = method.selector.needs
        reporting: list[tuple[_ReportPrice, Sequence[int]]] = []  # prices and who pays them
        if has_choice or trained:
            reporting.append((_report_price(needs, self.sizes), list(examples)))
        if has_choice:
            needs_after = method.selector.learns_from | method.aggregator.needs
            sent_later = _sent_later(needs, needs_after)
            reporting.append((_report_price(sent_later, self.sizes), selected))

        state = self.sizes.state
        uploads = len(selected)
        receivers = len(trained)
        floats_up = 0
        floats_down = 0
        client_examples = 0.0  # of forward passes for reports
        server_examples = 0.0
        for price, clients in reporting:
            count = len(clients)
            local_examples = sum(examples[client] for client in clients)
            floats_up += count * price.floats_up
            floats_down += count * price.floats_down
            client_examples += local_examples * price.client_passes + count * price.client_examples
            server_examples += price.server_examples + count * price.server_examples_each
            if price.needs_model:
                receivers = max(receivers, count)
            if price.uploads_model:
                uploads = max(uploads, count)
        flops_per_example = self.flops.train
        if method.objective.distill > 0:  # clients run the received model beside their own
            flops_per_example += self.flops.forward
        trained_examples = sum(examples[client] for client in trained)
        training = trained_examples * self.epochs * flops_per_example
        client_passes = client_examples * self.flops.forward
        server_passes = server_examples * self.flops.forward
        aggregation = 2 * len(selected) * state
        return RoundCost(
            uplink_bytes=round(FLOAT_BYTES * (uploads * state + floats_up)),
            downlink_bytes=round(FLOAT_BYTES * (receivers * state + floats_down)),
            client_flops=round(training + client_passes),
            server_flops=round(aggregation + server_passes) + selector_flops,
        )
