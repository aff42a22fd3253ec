"""Clients that diverge, with finite models or not: nobody crashes, no global model is spoilt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fakes
from fedglimpse.agent.inputs import LARGEST, features_of
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.methods import oort, palit
from fedglimpse.methods.base import Setting, top_slots
from fedglimpse.methods.dpp import Diverse
from fedglimpse.methods.fedabc import attention
from fedglimpse.methods.fedawac import Options, consistency_weights
from fedglimpse.methods.herd import Herd
from fedglimpse.methods.registry import MODULES
from fedglimpse.runs.build import build_world
from fedglimpse.runs.experiment import run
from fedglimpse.runs.rounds import run_round
from fedglimpse.simulation.trainers.jobs import LocalTrainer, TrainingJobs, TrainingResults
from fedglimpse.types import Choice, Outcome, Update

SIZES = torch.tensor([10, 20, 30])
SHORT = {"rounds": 12, "evaluate.every": 100, "agent.learn_start": 2, "agent.n_step": 1}


@pytest.mark.parametrize("lr", [3.0, 100.0])
@pytest.mark.parametrize("method", MODULES)
def test_every_method_goes_on_with_a_finite_model(method: str, lr: float) -> None:
    oracle = {"options.allow_oracle": True} if method == "oracle-balance" else {}
    done = run({"method": method, "local.lr": lr, **SHORT, **oracle})
    assert done.world.states.isfinite().all()
    learnt = [r[name] for r in done.records for name in ("td_loss", "mean_q") if name in r]
    assert all(map(math.isfinite, learnt))
    assert all(math.isfinite(w) for r in done.records for w in r["weights"])


def test_fedawac_gives_a_diverged_model_no_weight() -> None:
    v = torch.tensor([1.0, math.inf, 2.0])
    weights = consistency_weights(v, SIZES, Options())
    assert weights[1] == 0
    assert weights[[0, 2]].tolist() == pytest.approx(
        consistency_weights(v[[0, 2]], SIZES[[0, 2]], Options()).tolist()
    )
    nothing = consistency_weights(torch.full((3,), math.nan), SIZES, Options())
    assert nothing.tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 2])


def test_fedabc_hears_those_who_predict_something() -> None:
    predictions = torch.tensor([[[0.5, 0.5]], [[math.nan, math.nan]], [[0.4, 0.6]]])
    scores = attention(predictions)
    assert scores[1] == 0
    assert scores[[0, 2]].tolist() == pytest.approx(attention(predictions[[0, 2]]).tolist())
    assert attention(torch.full((2, 1, 2), math.nan)).tolist() == [0, 0]


def test_oort_learns_nothing_from_a_loss_that_is_not_finite() -> None:
    selector = oort.Oort(torch.full((4,), 10), oort.Options())
    for losses in ([1.0, 2.0, 3.0, math.inf], [1.5, math.inf, math.nan, 4.0]):
        selector.feedback(
            Outcome(
                round_num=0,
                selected=torch.arange(4),
                reward=0.0,
                score=0.0,
                per_class=torch.zeros(2),
                reward_per_class=torch.zeros(2),
                weights=torch.full((4,), 0.25),
                reports={"rms_loss": torch.tensor(losses)},
            )
        )
    assert selector.utility.tolist() == [15, 20, 30, 40]


def test_palit_forgets_no_number_after_a_huge_update() -> None:
    method = palit.build(Setting(Config(method="palit"), 0, torch.full((6,), 10), 10, 8))
    generator = torch.Generator().manual_seed(0)
    state = torch.ones(8)
    for round_num, size in enumerate((1e25, 0.1, 0.1)):
        deltas = 0.1 * torch.randn(3, 8, generator=generator)
        deltas[0] = size
        update = Update(
            round_num=round_num,
            ids=torch.arange(3),
            sizes=torch.full((3,), 10),
            starts=state.expand(3, -1),
            deltas=deltas,
            weights=torch.full((3,), 1 / 3),
            num_params=8,
            reports={},
        )
        state = method.aggregator.step(torch.ones(8), update)
        assert method.aggregator.applied is not None
        assert method.aggregator.applied.isfinite().all()
        trust = method.selector.trust  # type: ignore[attr-defined]
        assert trust.judge(0.5, round_num)["trust"] > 0


@pytest.mark.parametrize("huge", [math.nan, math.inf, -1e25])
def test_one_client_beyond_measure_is_shown_as_zero(huge: float) -> None:
    sketches = torch.eye(4)[:3]
    sketches[1, 0] = huge
    seen = fakes.view(ids=[0, 1, 2], reports={"delta_sketch": sketches})
    shown = features_of(seen, "grad", standardise=False)
    assert shown[1].tolist() == [0, 1, 0, 0]
    assert features_of(seen, "grad", standardise=True).abs().max() < LARGEST
    for selector in (Herd(), Diverse()):
        assert len(set(selector.select(seen, 2).slots.tolist())) == 2


def test_a_score_that_is_no_number_is_the_worst() -> None:
    scores = torch.tensor([1.0, math.nan, -math.inf, 3.0])
    for seed in range(20):
        slots = top_slots(scores, 2, torch.Generator().manual_seed(seed)).tolist()
        assert slots == [3, 0]


def test_shares_of_failed_updates_go_to_the_others() -> None:
    quarter = torch.full((4,), 0.25)
    for shares, expected in ((True, [0.5, 0.5]), (False, [0.25, 0.25])):
        weights = Choice(torch.arange(4), quarter, shares=shares).weights_at([0, 3])
        assert weights is not None
        assert weights.tolist() == expected
    twice = Choice(torch.arange(2), torch.tensor([0.5, 1.5]), shares=True).weights_at([0])
    assert twice is not None
    assert twice.tolist() == [2.0]  # a factor on the whole step stays
    assert Choice(torch.arange(2)).weights_at([1]) is None


class FirstFails:
    """A trainer whose first client comes back with a model that is not finite."""

    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        trained = self.trainer.train(start, jobs)
        states = trained.states.clone()
        states[0] = math.nan
        return replace(trained, states=states)


@pytest.mark.parametrize(
    ("method", "options", "total"),
    [
        ("power-of-choice", {}, 1.0),
        ("edgeflow", {"options.weights": "uniform"}, 1.0),
        ("ha-edgeflow", {"options.weights": "uniform"}, 1.0),
        ("f3ast", {"options.mode": "normalised", "options.server_lr": 2.0}, 2.0),
        ("fedavg", {}, 1.0),
    ],
)
def test_a_mean_stays_a_mean_where_an_update_is_refused(
    method: str, options: dict[str, object], total: float
) -> None:
    config = resolve({"method": method, **options})
    world = build_world([config])
    world.trainer = FirstFails(world.trainer)
    for _ in range(3):
        record = run_round(world, False)[0]
        assert len(record["rejected"]) == 1
        assert sum(record["weights"]) == pytest.approx(total)
