"""The state of a federation on devices, and which methods it can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.schema import Config
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.federation import reports as catalogue
from fedglimpse.federation.costs import CostModel, ModelFlops
from fedglimpse.federation.reports import CATALOGUE, PERMISSION, Sizes
from fedglimpse.federation.state import Layout
from fedglimpse.federation.visibility import build_visibility
from fedglimpse.flower.claims import clipped_sizes
from fedglimpse.flower.clients import KnownClients
from fedglimpse.flower.device import objective_parts
from fedglimpse.flower.exchange import Exchange
from fedglimpse.methods.base import Setting
from fedglimpse.methods.build import build_method
from fedglimpse.runs.build import sketch_of
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.evaluation import Evaluator, Reward
from fedglimpse.simulation.plugin_checks import check_method, check_state
from fedglimpse.types import Method, Selector, Visibility

Examples = tuple[Tensor, Tensor]  # raw examples [n, *shape] and labels [n]

READ_OFF = frozenset({"delta_similarity", "proxy_logits"})  # only the server can compute them

WITHOUT_EFFECT = (  # settings that only the simulator follows; setting one is an error
    "log.tensorboard",
    "log.own",
    "checkpoint.keep_models",
)


@dataclass(frozen=True)
class Problem:
    """The model that is trained, and the examples that the server scores it on."""

    model: Callable[[], nn.Module]  # the same as on the clients
    proxy: Examples  # the server's own examples, from which the reward is computed
    num_classes: int
    test: Examples | None = None  # for the accuracy in the records; None: the proxy set


@dataclass(frozen=True)
class ServerTerms:
    """How long the server waits, and how few answers are enough: `terms.*`.

    Work that was sent is not cancelled on a node, so timeouts belong well above the usual time.
    """

    min_clients: int = 0  # that must be online before the first round; 0: `data.clients`
    start_timeout: float = 600.0  # seconds to wait for them
    visible_timeout: float = 300.0  # to wait for `visibility.min_visible` before a round passes
    hello_timeout: float = 60.0
    train_timeout: float = 600.0
    upload_timeout: float = 120.0
    quorum: float = 0.5  # share of the clients asked that must answer, else the round passes
    max_examples: int = 1_000_000  # a client that reports more is refused
    max_share: float = 0.5  # of a round's weight; of three clients or more, none gets more
    poll: float = 0.01  # seconds between two polls; grows to half a second while nothing arrives
    patience: float = 3.0  # a silent node gets new work after this many timeouts

    def __post_init__(self) -> None:
        """Raise UserError for a term that cannot work."""
        for item in fields(self):
            value = getattr(self, item.name)
            _check_number(item.name, value, integer=isinstance(item.default, int))
            in_range, advice = _RANGES[item.name]
            if not in_range(value):
                raise UserError(f"{item.name}={value} {advice}", key=f"terms.{item.name}")


Range = tuple[Callable[[float], bool], str]  # what is allowed, and the advice where it is not

_SECONDS: Range = (lambda seconds: seconds > 0, "must be greater than 0 seconds.")
_NOT_NEGATIVE: Range = (lambda value: value >= 0, "is too small: use 0 or more.")

_RANGES: Mapping[str, Range] = {
    "min_clients": _NOT_NEGATIVE,
    "start_timeout": _NOT_NEGATIVE,
    "visible_timeout": _NOT_NEGATIVE,
    "hello_timeout": _SECONDS,
    "train_timeout": _SECONDS,
    "upload_timeout": _SECONDS,
    "quorum": (lambda value: 0 <= value <= 1, "is not a share: use 0 to 1, such as 0.5."),
    "max_examples": (lambda value: value >= 1, "is too small: use 1 or more."),
    "max_share": (lambda value: 0 < value <= 1, "is not a share: use more than 0, up to 1."),
    "poll": _SECONDS,
    "patience": (lambda value: value >= 1, "must be 1 or more timeouts."),
}


def _check_number(name: str, value: object, integer: bool) -> None:
    """Raise UserError for a term that is not a finite number of its kind."""
    kind = int if integer else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        expected = "a whole number" if integer else "a finite number"
        default = getattr(ServerTerms, name)
        raise UserError(
            f"{name}={value!r} must be {expected}, such as {default}.", key=f"terms.{name}"
        )


@dataclass(frozen=True)
class RoundPlan:
    """The phases of a method's rounds on devices, and what its clients are asked for."""

    asks_all: bool  # every visible client is asked before the choice
    trains_all: bool  # ... and trains
    uploads_all: bool  # ... and sends its whole update
    before_choice: frozenset[str]  # reports that clients send before the choice
    with_update: frozenset[str]  # reports that come with the update
    read_off: frozenset[str]  # reports that the server computes from the updates
    objectives: frozenset[str]  # what clients must be able to minimise

    @property
    def required(self) -> frozenset[str]:
        """What a client must be able to do."""
        return self.before_choice | self.with_update | self.objectives

    @staticmethod
    def of(method: Method, config: Config) -> RoundPlan:
        """Return the plan of a method, or raise UserError where it cannot run on devices."""
        check_method(method)
        needs = method.selector.needs
        needs_after = method.selector.learns_from | method.aggregator.needs
        _check_no_oracle(needs | needs_after, config)
        asked_before = _of_clients(needs)
        from_upload = frozenset(name for name in needs_after if CATALOGUE[name].from_upload)
        read_off = from_upload | (READ_OFF & (needs_after | asked_before))
        return RoundPlan(
            asks_all=bool(asked_before),
            trains_all=catalogue.trains_before_choice(needs),
            uploads_all=bool(asked_before & READ_OFF),
            before_choice=asked_before - READ_OFF,
            with_update=_of_clients(needs_after - read_off),
            read_off=read_off,
            objectives=objective_parts(method.objective),
        )


def _of_clients(reports: frozenset[str]) -> frozenset[str]:
    """Return the reports that clients send, and the server does not compute by itself."""
    return frozenset(name for name in reports if CATALOGUE[name].phase != "server")


def _check_no_oracle(reports: frozenset[str], config: Config) -> None:
    """Raise UserError for a method that reads private data, or a permission to do so."""
    for name in sorted(reports):
        if CATALOGUE[name].oracle:
            raise UserError(
                f"method={config.method} reads '{name}', which no real server may know, so it "
                "cannot run on devices: run it in the simulator, or choose another method.",
                key="method",
            )
    if config.options.get(PERMISSION):
        raise UserError(
            f"options.{PERMISSION}={config.options[PERMISSION]} has no effect on devices, where "
            "nothing private is read: leave it out.",
            key=f"options.{PERMISSION}",
        )


def check_settings(config: Config) -> None:
    """Raise UserError for a setting that only the simulator follows."""
    settings = config.flat()
    for key in WITHOUT_EFFECT:
        if settings.get(key):
            raise UserError(
                f"{key}={settings[key]} has no effect on devices: leave it out.", key=key
            )


def method_on_devices(setting: Setting) -> Method:
    """Build a method to inspect; raises UserError where it cannot run on devices.

    It is built as if it were allowed to be an oracle: the simulator's advice to allow it would not
    help here, where an oracle is refused in any case.
    """
    config = setting.config
    permissive = replace(config, options={**config.options, PERMISSION: True})
    method = build_method(config.method, replace(setting, config=permissive))
    RoundPlan.of(method, config)
    return method


@dataclass
class Deployment:
    """One federation on devices, between two rounds."""

    config: Config
    problem: Problem
    terms: ServerTerms
    exchange: Exchange
    clients: KnownClients
    setting: Setting
    method: Method
    plan: RoundPlan
    state: Tensor  # [d] the global model
    layout: Layout
    evaluator: Evaluator
    reporter: Reporter
    costs: CostModel
    reward: Reward
    visibility: Visibility
    user_settings: Mapping[str, Any] = field(default_factory=dict)  # sent to all clients
    visits: int = 0  # clients that were asked to train in all rounds

    @staticmethod
    def build(
        config: Config,
        problem: Problem,
        terms: ServerTerms,
        exchange: Exchange,
        clients: KnownClients,
        state: Tensor,
        user_settings: Mapping[str, Any],
        sizes: Tensor,
    ) -> Deployment:
        """Build a federation.

        Args:
            config: of the run, with one seed.
            problem: model and the server's examples.
            terms: timeouts and quorum.
            exchange: how nodes are reached.
            clients: all clients met so far.
            state: the global model.  # [d]
            user_settings: the user's own settings for clients.
            sizes: local examples as reported before round 0.  # [N]
        """
        model = fresh_model(config, problem)
        layout = Layout.of(model)
        classes = problem.num_classes
        evaluator = Evaluator(model, classes)
        two_inputs = as_input(problem.proxy[0][:2])
        flops = ModelFlops.of(fresh_model(config, problem), two_inputs, classes)
        lengths = Sizes(
            state=layout.size,
            sketch=config.sketch.size,
            proxy=len(problem.proxy[1]),
            classes=classes,
        )
        sizes = clipped_sizes(sizes, terms.max_share)
        setting = Setting(config, config.seeds[0], sizes, classes, layout.num_params)
        method = build_method(config.method, setting)
        return Deployment(
            config=config,
            problem=problem,
            terms=terms,
            exchange=exchange,
            clients=clients,
            setting=setting,
            method=method,
            plan=RoundPlan.of(method, config),
            state=state,
            layout=layout,
            evaluator=evaluator,
            reporter=Reporter(sketch_of(config, layout), layout.num_params, evaluator),
            costs=CostModel(flops, lengths, config.local.epochs),
            reward=Reward(config.reward.metric, config.reward.smoothing),  # type: ignore[arg-type]
            visibility=build_visibility(config.visibility, clients.capacity),
            user_settings=user_settings,
        )

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seeds[0]

    @property
    def sizes(self) -> Tensor:
        """Local examples of all N clients, as last reported, each a bounded share `[N]`."""
        sizes = torch.tensor(self.clients.typical_sizes())
        return clipped_sizes(sizes, self.terms.max_share)

    @property
    def server_data(self) -> Population:
        """The proxy set as the simulator's reports read it."""
        x, y = self.problem.proxy
        dataset = Dataset("proxy", "proxy", x, y, x[:0], y[:0], self.problem.num_classes)
        return Population(dataset, (), torch.arange(len(y)))

    def twin(self) -> Selector:
        """Return a copy of the selector, for choices that must not change its state."""
        selector = build_method(self.config.method, self.setting).selector
        selector.load_state_dict(self.method.selector.state_dict())
        return selector

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue between two rounds."""
        selector = self.method.selector
        selector_state = selector.state_dict()
        check_state(selector, selector_state)
        aggregator = self.method.aggregator
        aggregator_state = aggregator.state_dict()
        check_state(aggregator, aggregator_state)
        return {
            "state": self.state.clone(),
            "visits": self.visits,
            "selector": selector_state,
            "aggregator": aggregator_state,
            "reward": self.reward.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `saved`."""
        self.state = saved["state"].clone()
        self.visits = saved["visits"]
        self.method.selector.load_state_dict(saved["selector"])
        self.method.aggregator.load_state_dict(saved["aggregator"])
        self.reward.load_state_dict(saved["reward"])


def fresh_model(config: Config, problem: Problem) -> nn.Module:
    """Return a new model with the initial weights of the run's seed."""
    with rng.isolated(config.seeds[0], "model"):
        return problem.model()
