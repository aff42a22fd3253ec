"""What a server of real devices is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.schema import Config
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.federation.costs import CostModel, ModelFlops
from fedglimpse.federation.reports import Sizes
from fedglimpse.federation.state import Layout
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.identity import Roster
from fedglimpse.flower.served import Plan, plan_of
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.runs.build import sketch_of, visibility_of
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.evaluation import Evaluator, Reward
from fedglimpse.simulation.lane import check_state
from fedglimpse.types import Method, Selector, Visibility

Examples = tuple[Tensor, Tensor]  # raw examples [n, *shape] and labels [n]


@dataclass(frozen=True)
class Problem:
    """What is learnt, and how the server judges it."""

    model: Callable[[], nn.Module]  # the same as on the clients
    proxy: Examples  # the server's own examples: what methods are rewarded by
    num_classes: int
    test: Examples | None = None  # what records are scored on; None: the proxy set


@dataclass(frozen=True)
class Terms:
    """How long the server waits, and how few answers are enough.

    Work that was sent is not cancelled on a node, so timeouts belong well above the usual time.
    """

    min_clients: int = 0  # that must be there before the first round; 0: `data.clients`
    start_timeout: float = 600.0  # seconds to wait for them
    visible_timeout: float = 300.0  # to wait for `visibility.min_visible` before a round passes
    hello_timeout: float = 60.0
    train_timeout: float = 600.0
    upload_timeout: float = 120.0
    quorum: float = 0.5  # share of those asked that must answer, else the round passes
    poll: float = 0.01  # seconds between looks for answers; grows to half a second of silence
    patience: float = 3.0  # a silent node gets new work after so many timeouts

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for item in fields(self):
            _check_number(item.name, getattr(self, item.name), whole=isinstance(item.default, int))
        if not 0 <= self.quorum <= 1:
            raise UserError(f"quorum={self.quorum} is not a share: use 0 to 1, such as 0.5.")
        for name in ("hello_timeout", "train_timeout", "upload_timeout", "poll"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)} must be greater than 0 seconds.")
        for name in ("min_clients", "start_timeout", "visible_timeout"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is too small: use 0 or more.")
        if self.patience < 1:
            raise UserError(f"patience={self.patience} must be 1 or more timeouts.")


def _check_number(name: str, value: object, whole: bool) -> None:
    """Raise UserError for a term that is not a finite number of its kind."""
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        wanted = "a whole number" if whole else "a finite number"
        raise UserError(f"{name}={value!r} must be {wanted}, such as {getattr(Terms, name)}.")


@dataclass
class Federation:
    """One federation on Flower, between two rounds."""

    config: Config
    problem: Problem
    terms: Terms
    exchange: Exchange
    roster: Roster
    setting: Setting
    method: Method
    plan: Plan
    state: Tensor  # [d] the global model
    layout: Layout
    evaluator: Evaluator
    reporter: Reporter
    costs: CostModel
    reward: Reward
    visibility: Visibility
    told: Mapping[str, Any] = field(default_factory=dict)  # the user's own settings for clients
    visits: int = 0  # clients that were asked to train in all rounds

    @staticmethod
    def build(
        config: Config,
        problem: Problem,
        terms: Terms,
        exchange: Exchange,
        roster: Roster,
        state: Tensor,
        told: Mapping[str, Any],
        sizes: Tensor,
    ) -> Federation:
        """Put a federation together.

        Args:
            config: of the run, with one seed.
            problem: model and the server's examples.
            terms: timeouts and quorum.
            exchange: how nodes are reached.
            roster: who has been met.
            state: the global model.  # [d]
            told: the user's own settings for clients.
            sizes: local examples as they were known before round 0.  # [N]
        """
        model = fresh_model(config, problem)
        layout, classes = Layout.of(model), problem.num_classes
        evaluator = Evaluator(model, classes)
        lengths = Sizes(layout.size, config.sketch.size, len(problem.proxy[1]), classes)
        flops = ModelFlops.of(
            fresh_model(config, problem), as_input(problem.proxy[0][:2]), problem.num_classes
        )
        setting = Setting(config, config.seeds[0], sizes, classes, layout.num_params)
        method = registry.build(config.method, setting)
        return Federation(
            config=config,
            problem=problem,
            terms=terms,
            exchange=exchange,
            roster=roster,
            setting=setting,
            method=method,
            plan=plan_of(method, config),
            state=state,
            layout=layout,
            evaluator=evaluator,
            reporter=Reporter(sketch_of(config, layout), layout.num_params, evaluator),
            costs=CostModel(flops, lengths, config.local.epochs),
            reward=Reward(config.reward.metric, config.reward.smoothing),  # type: ignore[arg-type]
            visibility=visibility_of(config, roster.room),
            told=told,
        )

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seeds[0]

    @property
    def sizes(self) -> Tensor:
        """Local examples of all N clients, as last heard `[N]`."""
        return torch.tensor(self.roster.typical_sizes())

    @property
    def server_data(self) -> Population:
        """The proxy set as the simulator's reports read it."""
        x, y = self.problem.proxy
        dataset = Dataset("proxy", "proxy", x, y, x[:0], y[:0], self.problem.num_classes)
        return Population(dataset, (), torch.arange(len(y)))

    def twin(self) -> Selector:
        """Return a second selector in the same state, to ask what if."""
        selector = registry.build(self.config.method, self.setting).selector
        selector.load_state_dict(self.method.selector.state_dict())
        return selector

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue between two rounds."""
        selector, aggregator = self.method.selector, self.method.aggregator
        saved = {"selector": selector.state_dict(), "aggregator": aggregator.state_dict()}
        check_state(selector, saved["selector"])
        check_state(aggregator, saved["aggregator"])
        return {
            "state": self.state.clone(),
            "visits": self.visits,
            **saved,
            "reward": self.reward.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `saved`."""
        self.state, self.visits = saved["state"].clone(), saved["visits"]
        self.method.selector.load_state_dict(saved["selector"])
        self.method.aggregator.load_state_dict(saved["aggregator"])
        self.reward.load_state_dict(saved["reward"])


def fresh_model(config: Config, problem: Problem) -> nn.Module:
    """Return a new model with the initial weights of the run's seed."""
    with rng.isolated(config.seeds[0], "model"):
        return problem.model()
