"""Whole rounds on a GPU: reproducible, the same in company, in little memory, in any precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
from rl_fakes import C, D, config, outcome, view

from fedglimpse.cli import bench
from fedglimpse.config.loading import resolve
from fedglimpse.data import sources
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.runs.experiment import run
from fedglimpse.runs.rounds import run_round, selectors_of
from fedglimpse.simulation.evaluation import Evaluator, on_its_way
from fedglimpse.simulation.trainers.choose import many_models
from fedglimpse.types import View

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
MODELS = {
    "cifar10": (nets.cifar_cnn, (3, 32, 32), 10),
    "fashion": (nets.fashion_cnn, (1, 28, 28), 10),
    "har": (nets.har_mlp, (561,), 6),
}


def noise_rounds(name: str, seeds: list[int], rounds: int, **keys: Any) -> list[dict[str, Any]]:
    """Play glimpse on noise of a dataset's shape; returns all records."""
    settings = bench.settings(name, 1, "cuda", "fp32", "auto").flat()
    settings |= {"seeds": seeds, "agent.learn_start": 4, "agent.epsilon_decay": 0.05, **keys}
    settings = {k: v for k, v in settings.items() if not k.startswith("options")}
    config = resolve(settings)
    world, _ = bench.noise_world(config)
    selectors = selectors_of(world)
    return [record for _ in range(rounds) for record in run_round(world, False, selectors)]


def test_transfers_carry_what_was_there_when_they_began() -> None:
    """The device is kept busy, and both sides are changed right after the call."""
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        busy = busy @ busy / 100
    values = torch.arange(1000.0, device=CUDA) + busy[0, 0].nan_to_num() * 0
    home = on_its_way(values)
    values.zero_()
    small = torch.arange(1000)
    there = small.to(CUDA, non_blocking=True)  # as local_training.py sends numbers
    small.zero_()
    assert torch.equal(home(), torch.arange(1000.0))
    assert torch.equal(there.cpu(), torch.arange(1000))


@pytest.mark.parametrize("method", ["glimpse", "f3ast", "favor"])
def test_learning_beside_training_gives_the_same_records(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"method": method, "engine.device": "cuda", "rounds": 40, "seeds": [0, 1]}
    keys |= {"checkpoint.every": 40}
    keys |= {"agent.learn_start": 4, "agent.epsilon_decay": 0.05} if method == "glimpse" else {}
    beside = run(keys).records
    monkeypatch.setattr("fedglimpse.runs.experiment.trains_in_background", lambda world: False)
    after = run(keys).records
    for ours, theirs in zip(beside, after, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


@pytest.mark.parametrize("changes", [{}, {"q_output": "per_class", "aux_weight": 0.15}], ids=str)
def test_a_team_learns_the_same_on_both_devices(changes: dict[str, Any]) -> None:
    teams = [
        GlimpseSelector.group(
            [
                GlimpseSelector(
                    config(**changes),
                    sketch_dim=D,
                    num_classes=C,
                    num_clients=40,
                    seed=seed,
                    device=device,
                )
                for seed in range(3)
            ]
        )
        for device in ("cpu", "cuda")
    ]
    for round_num in range(20):
        answers = []
        for team in teams:
            shown = [view(100 * r + round_num, visible=1 + (round_num + r) % 7) for r in range(3)]
            shown = [View(**{**vars(s), "round_num": round_num}) for s in shown]
            choices = team.select(shown, [3] * 3)
            pairs = zip(shown, choices, strict=True)
            losses = team.feedback([outcome(s, c.slots) for s, c in pairs if c])
            answers.append(([c.slots.tolist() for c in choices if c], losses))
        assert answers[0][0] == answers[1][0]
    for ours, theirs in zip(answers[0][1], answers[1][1], strict=True):
        assert ours["td_loss"] == pytest.approx(theirs["td_loss"], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_many_states_at_once_equal_one_by_one(name: str) -> None:
    build, shape, classes = MODELS[name]
    model = build().cuda()
    layout = Layout.of(model)
    states = torch.stack([layout.read(build().cuda()) for _ in range(3)])
    states[:, layout.num_params :] += 0.2 * torch.rand_like(states[:, layout.num_params :])
    x = torch.rand(3, 50, *shape, device=CUDA)
    y = torch.randint(classes, (3, 50), device=CUDA)
    slow = Evaluator(model, classes)
    fast = Evaluator(model, classes, many=many_models(model, shape, CUDA, "fp32"))
    torch.testing.assert_close(
        fast.logits_of(states, x), slow.logits_of(states, x), rtol=1e-3, atol=1e-4
    )
    ours, theirs = (e.mean_gradients(states, list(x), list(y)) for e in (fast, slow))
    assert float((ours - theirs).norm() / theirs.norm()) < 5e-3


def test_the_same_seed_chooses_the_same_for_fifty_rounds() -> None:
    first, second = (noise_rounds("fashion", [0, 1], 50) for _ in range(2))
    assert [r["selected"] for r in first] == [r["selected"] for r in second]
    assert [r["mean_q"] for r in first] == [r["mean_q"] for r in second]
    greedy = [r for r in first if r["behaviour"] == "greedy"]
    assert len(greedy) > 20  # choices that depend on every number before them


def test_lanes_together_equal_lanes_alone() -> None:
    """After one round: later, rounding grows as it does between two layouts of one trainer."""
    together = noise_rounds("har", [3, 4], 2)
    alone = noise_rounds("har", [4], 2)
    beside = [r for r in together if r["seed"] == 4]
    assert [r["selected"] for r in alone] == [r["selected"] for r in beside]
    for ours, theirs in zip(alone, beside, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)


def test_lanes_report_and_merge_together_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    together = noise_rounds("har", [3, 4, 5], 2)
    monkeypatch.setattr("fedglimpse.federation.devices.SEPARATE_LANES", ("cpu", "cuda"))
    apart = noise_rounds("har", [3, 4, 5], 2)
    assert [r["selected"] for r in together] == [r["selected"] for r in apart]
    for ours, theirs in zip(together, apart, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=5e-3)


@pytest.fixture
def small_card() -> Iterator[None]:
    """Let this process use 16 GiB at most."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, 16 * 2**30 / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("small_card")
def test_many_lanes_fit_a_card_of_16_gib() -> None:
    records = noise_rounds("cifar10", list(range(20)), 1)
    assert len(records) == 20
    assert all(len(r["selected"]) == 5 for r in records)
    assert torch.cuda.max_memory_reserved() <= 16 * 2**30


def test_precision_changes_speed_not_accuracy() -> None:
    if not sources.status("fashion").present:
        pytest.skip("Fashion-MNIST is not there")
    final: dict[str, list[float]] = {}
    for precision in ("fp32", "tf32", "bf16"):
        result = run(
            {
                "method": "fedavg-window",
                "data.name": "fashion",
                "seeds": [0, 1, 2],
                "rounds": 60,
                "evaluate.every": 5,
                "engine.device": "cuda",
                "engine.precision": precision,
            }
        )
        final[precision] = [e["final_accuracy"] for e in result.summary["seeds"].values()]
    print(final)
    spread = stdev(final["fp32"])
    for precision in ("tf32", "bf16"):
        apart = [a - b for a, b in zip(final[precision], final["fp32"], strict=True)]
        assert abs(mean(apart)) < max(spread, 0.01), (precision, final)
