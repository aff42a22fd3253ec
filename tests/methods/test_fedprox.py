from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fakes
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer


class OneWeight(nn.Module):
    """A model that is its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


@pytest.fixture
def _quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example has the loss (w - 3)^2 / 2."""

    def loss(output: Tensor, target: Tensor, reduction: str) -> Tensor:
        return 0.5 * (output - 3) ** 2

    monkeypatch.setattr(
        "fedglimpse.simulation.trainers.serial.F", SimpleNamespace(cross_entropy=loss)
    )


def trained(mu: float, steps: int, squared: bool = True) -> float:
    """Return the weight after some steps of SGD at 0.1, from the global model 1."""
    examples = Examples(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long), augment=False)
    recipe = TrainingRecipe(lr=0.1, batch_size=2, epochs=steps)
    jobs = TrainingJobs(
        start=torch.tensor([0]),
        keys=torch.tensor([1]),
        rows=torch.tensor([[0, 1]]),
        sizes=torch.tensor([2]),
        mu=torch.tensor([mu]),
        squared=torch.tensor([squared]),
        distill=torch.tensor([0.0]),
        temperature=torch.tensor([1.0]),
        visit=torch.tensor([-1]),
    )
    return SerialTrainer(OneWeight(), examples, recipe).train(torch.ones(1, 1), jobs).states.item()


@pytest.mark.usefixtures("_quadratic")
def test_the_worked_example() -> None:
    assert trained(mu=0, steps=2) == pytest.approx(1.38)
    assert trained(mu=0.5, steps=2) == pytest.approx(1.37)
    assert trained(mu=0.5, steps=200) == pytest.approx((3 + 0.5) / 1.5, abs=1e-4)


@pytest.mark.usefixtures("_quadratic")
def test_the_first_step_is_the_same_for_every_mu() -> None:
    for squared in (True, False):  # the plain norm has slope 0 at its tip
        assert {trained(mu, 1, squared) for mu in (0, 0.01, 1, 100)} == {trained(0, 1)}
    assert trained(0, 1) == pytest.approx(1.2)


@pytest.mark.usefixtures("_quadratic")
def test_the_unsquared_pull_is_the_same_at_every_distance() -> None:
    free = trained(mu=0, steps=2)
    assert trained(mu=0.5, steps=2, squared=False) == pytest.approx(free - 0.1 * 0.5)


def test_presets() -> None:
    tuned = fakes.build("fedprox").objective
    assert (tuned.proximal_mu, tuned.proximal_squared) == (0.01, True)
    released = fakes.build("fedprox", preset="released").objective
    assert (released.proximal_mu, released.proximal_squared) == (0.0005, False)
    assert fakes.build("fedprox", local__proximal_mu=1.0).objective.proximal_mu == 1.0
    assert fakes.build("fedavg").objective.proximal_mu == 0.0
