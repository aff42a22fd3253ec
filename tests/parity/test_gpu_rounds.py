"""Whole rounds on a GPU: reproducible, the same beside other lanes, in any precision."""

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

from fedglimpse.cli import timing
from fedglimpse.config.loading import resolve
from fedglimpse.data import sources
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.runs.experiment import run
from fedglimpse.runs.rounds import run_round, selectors_of
from fedglimpse.simulation.evaluation import Evaluator, start_copy_to_cpu
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


EARLY_LEARNING = {"agent.learn_start": 4, "agent.epsilon_decay": 0.05}


def noise_rounds(name: str, seeds: list[int], rounds: int) -> list[dict[str, Any]]:
    """Run glimpse on noise of a dataset's shape; returns all records."""
    settings = timing.settings(name, 1, "cuda", "fp32", "auto").flat()
    settings = {key: value for key, value in settings.items() if not key.startswith("options")}
    world, _ = timing.noise_world(resolve({**settings, **EARLY_LEARNING, "seeds": seeds}))
    selectors = selectors_of(world)
    records = []
    for _ in range(rounds):
        records += run_round(world, False, selectors)
    return records


def values_of(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records]


def test_transfers_carry_the_values_at_the_time_of_the_call() -> None:
    """The device is kept busy, and both sides are changed right after the call."""
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        busy = busy @ busy / 100
    values = torch.arange(1000.0, device=CUDA) + busy[0, 0].nan_to_num() * 0
    on_cpu, has_arrived = start_copy_to_cpu(values)
    values.zero_()
    numbers = torch.arange(1000)
    on_gpu = numbers.to(CUDA, non_blocking=True)  # as local_training.py sends numbers
    numbers.zero_()
    has_arrived.synchronize()
    assert torch.equal(on_cpu, torch.arange(1000.0))
    assert torch.equal(on_gpu.cpu(), torch.arange(1000))


@pytest.mark.parametrize("method", ["glimpse", "f3ast", "favor"])
def test_learning_beside_training_gives_the_same_records(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": method, "engine.device": "cuda", "rounds": 40, "seeds": [0, 1]}
    settings["checkpoint.every"] = 40
    if method == "glimpse":
        settings |= EARLY_LEARNING
    overlapping = run(settings).records
    monkeypatch.setattr("fedglimpse.runs.experiment.trains_in_background", lambda world: False)
    sequential = run(settings).records
    for record, expected in zip(overlapping, sequential, strict=True):
        assert {**record, "seconds": 0} == {**expected, "seconds": 0}


def group_of_three(device: str, changes: dict[str, Any]) -> Any:
    selectors = []
    for seed in range(3):
        selector = GlimpseSelector(
            config(**changes),
            sketch_dim=D,
            num_classes=C,
            num_clients=40,
            seed=seed,
            device=device,
        )
        selectors.append(selector)
    return GlimpseSelector.group(selectors)


def views_of_round(round_num: int) -> list[View]:
    views = []
    for lane in range(3):
        lane_view = view(100 * lane + round_num, visible=1 + (round_num + lane) % 7)
        views.append(View(**{**vars(lane_view), "round_num": round_num}))
    return views


def slots_and_losses(group: Any, round_num: int) -> tuple[list[list[int]], list[dict[str, float]]]:
    """Run one round of a group of selectors."""
    slots = []
    outcomes = []
    views = views_of_round(round_num)
    for lane_view, choice in zip(views, group.select(views, [3] * 3), strict=True):
        if choice:
            slots.append(choice.slots.tolist())
            outcomes.append(outcome(lane_view, choice.slots))
    return slots, group.feedback(outcomes)


@pytest.mark.parametrize("changes", [{}, {"q_output": "per_class", "aux_weight": 0.15}], ids=str)
def test_agents_learn_the_same_on_both_devices(changes: dict[str, Any]) -> None:
    on_cpu = group_of_three("cpu", changes)
    on_gpu = group_of_three("cuda", changes)
    for round_num in range(20):
        slots, losses = slots_and_losses(on_gpu, round_num)
        expected_slots, expected_losses = slots_and_losses(on_cpu, round_num)
        assert slots == expected_slots
    for lane_losses, expected in zip(losses, expected_losses, strict=True):
        assert lane_losses["td_loss"] == pytest.approx(expected["td_loss"], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_many_states_at_once_equal_one_by_one(name: str) -> None:
    build, shape, classes = MODELS[name]
    model = build().cuda()
    layout = Layout.of(model)
    states = torch.stack([layout.read(build().cuda()) for _ in range(3)])
    states[:, layout.num_params :] += 0.2 * torch.rand_like(states[:, layout.num_params :])
    x = torch.rand(3, 50, *shape, device=CUDA)
    y = torch.randint(classes, (3, 50), device=CUDA)
    one_by_one = Evaluator(model, classes)
    at_once = Evaluator(model, classes, many=many_models(model, shape, CUDA, "fp32"))
    logits = at_once.logits_of(states, x)
    torch.testing.assert_close(logits, one_by_one.logits_of(states, x), rtol=1e-3, atol=1e-4)
    gradients = at_once.mean_gradients(states, list(x), list(y))
    expected = one_by_one.mean_gradients(states, list(x), list(y))
    assert float((gradients - expected).norm() / expected.norm()) < 5e-3


def test_the_same_seed_chooses_the_same_for_fifty_rounds() -> None:
    first = noise_rounds("fashion", [0, 1], 50)
    second = noise_rounds("fashion", [0, 1], 50)
    assert values_of(first, "selected") == values_of(second, "selected")
    assert values_of(first, "mean_q") == values_of(second, "mean_q")
    # greedy choices depend on every number before them
    assert values_of(first, "behaviour").count("greedy") > 20


def test_lanes_together_equal_lanes_alone() -> None:
    """After one round: later, rounding grows as it does between two layouts of one trainer."""
    together = noise_rounds("har", [3, 4], 2)
    alone = noise_rounds("har", [4], 2)
    same_seed = [record for record in together if record["seed"] == 4]
    assert values_of(alone, "selected") == values_of(same_seed, "selected")
    for record, expected in zip(same_seed, alone, strict=True):
        assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)


def test_lanes_report_and_merge_together_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    together = noise_rounds("har", [3, 4, 5], 2)
    monkeypatch.setattr("fedglimpse.federation.devices.SEPARATE_LANES", ("cpu", "cuda"))
    apart = noise_rounds("har", [3, 4, 5], 2)
    assert values_of(together, "selected") == values_of(apart, "selected")
    assert values_of(together, "weights") == values_of(apart, "weights")
    for record, expected in zip(together, apart, strict=True):
        assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)
        assert record["reward"] == pytest.approx(expected["reward"], abs=5e-3)


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
    settings = {
        "method": "fedavg-window",
        "data.name": "fashion",
        "seeds": [0, 1, 2],
        "rounds": 60,
        "evaluate.every": 5,
        "engine.device": "cuda",
    }
    accuracies: dict[str, list[float]] = {}
    for precision in ("fp32", "tf32", "bf16"):
        seeds = run({**settings, "engine.precision": precision}).summary["seeds"]
        accuracies[precision] = [summary["final_accuracy"] for summary in seeds.values()]
    print(accuracies)
    tolerance = max(stdev(accuracies["fp32"]), 0.01)
    for precision in ("tf32", "bf16"):
        difference = mean(accuracies[precision]) - mean(accuracies["fp32"])
        assert abs(difference) < tolerance, (precision, accuracies)
