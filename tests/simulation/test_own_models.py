"""Models that users bring: whatever trainer they get, it trains what they wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedglimpse.config.schema import EngineConfig
from fedglimpse.errors import UserError
from fedglimpse.federation.models import head_entries
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.simulation.trainers.choose import check_trainer, many_models, trainer_of
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.simulation.trainers.stacked import unstackable

CPU = torch.device("cpu")
FEATURES, CLASSES = 8, 3
RECIPE = TrainingRecipe(lr=0.1, batch_size=16, epochs=2)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return nn.functional.linear(x, weight, self.bias)


def shared_activation() -> nn.Module:
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 3))


def shared_layer() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3))


def tied_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    return model


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Residual(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 3))


def subclass() -> nn.Module:
    return nn.Sequential(Centred(8, 16), nn.ReLU(), nn.Linear(16, 3))


def parametrised() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(16, 3))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def frozen_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


def frozen_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].bias.requires_grad_(requires_grad=False)
    return model


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


FLAT = [
    plain, shared_activation, shared_layer, tied_weights, residual, subclass, parametrised, hooked,
    frozen_layer, frozen_bias,
]  # fmt: skip


def rows_of_images() -> nn.Module:
    """A dense layer that works on the rows of an image."""
    return nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))


def sequences() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


SHAPED: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    *((make, (8,)) for make in FLAT),
    (rows_of_images, (1, 4, 2)),
    (rows_of_images, (4, 2)),
    (sequences, (1, 4, 2)),
    (sequences, (4, 2)),
]


def examples_of(shape: tuple[int, ...]) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, FEATURES, generator=generator).view(120, *shape)
    return Examples(x, torch.randint(CLASSES, (120,), generator=generator), augment=False)


@pytest.mark.parametrize(
    ("make", "shape"), SHAPED, ids=lambda v: v.__name__ if callable(v) else str(v)
)
def test_the_trainer_and_the_scores_of_auto_are_those_of_the_plain_loop(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    model, examples = make(), examples_of(shape)
    layout = Layout.of(model)
    start = layout.read(model)[None]
    jobs = TrainingJobs.plain(torch.arange(120).view(3, 40), torch.tensor([1, 2, 3]))
    auto = trainer_of(EngineConfig(), copy.deepcopy(model), examples, RECIPE, CPU, "fp32")
    serial = SerialTrainer(copy.deepcopy(model), examples, RECIPE)
    trained = serial.train(start, jobs).states
    torch.testing.assert_close(auto.train(start, jobs).states, trained, rtol=1e-4, atol=1e-5)
    slow = Evaluator(model, CLASSES)
    fast = Evaluator(model, CLASSES, many=many_models(model, shape, CPU, "fp32"))
    x = examples.x.view(3, 40, *shape)
    torch.testing.assert_close(fast.logits_of(trained, x), slow.logits_of(trained, x))
    asked = (trained, list(x), list(examples.y.view(3, 40)))
    torch.testing.assert_close(fast.mean_gradients(*asked), slow.mean_gradients(*asked))


def test_what_does_not_train_has_no_gradient_and_does_not_move() -> None:
    model, examples = frozen_layer(), examples_of((8,))
    layout = Layout.of(model)
    start, fixed = layout.read(model)[None], slice(0, 8 * 16 + 16)
    jobs = TrainingJobs.plain(torch.arange(40).view(1, 40), torch.tensor([1]))
    auto = trainer_of(EngineConfig(), copy.deepcopy(model), examples, RECIPE, CPU, "fp32")
    assert torch.equal(auto.train(start, jobs).states[:, fixed], start[:, fixed])
    gradient = Evaluator(model, CLASSES).mean_gradients(start, [examples.x], [examples.y])
    assert not gradient[:, fixed].any()
    assert gradient.any()


@pytest.mark.parametrize("make", [shared_layer, tied_weights, residual, subclass, hooked])
def test_a_trainer_that_would_train_something_else_is_refused(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(UserError, match=r"engine\.trainer=batched cannot stack .*=auto"):
        check_trainer("batched", make(), (8,), CPU)


def test_most_models_of_users_can_still_be_stacked() -> None:
    assert not unstackable(plain(), (8,))
    assert not unstackable(shared_activation(), (8,))
    assert not unstackable(sequences(), (1, 4, 2))


def test_counters_do_not_travel_from_client_to_client() -> None:
    """BatchNorm(momentum=None) averages over the batches that it has counted."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 3))
    start = Layout.of(model).read(model)[None]
    examples = examples_of((8,))
    both = TrainingJobs.plain(torch.arange(80).view(2, 40), torch.tensor([1, 2]))
    second = both.pick(torch.tensor([1]))
    together = SerialTrainer(copy.deepcopy(model), examples, RECIPE).train(start, both).states[1]
    alone = SerialTrainer(copy.deepcopy(model), examples, RECIPE).train(start, second).states[0]
    assert torch.equal(together, alone)


def test_a_model_that_ends_in_a_convolution_has_a_head() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    assert [e.name for e in head_entries(Layout.of(model))] == ["2.weight", "2.bias"]
