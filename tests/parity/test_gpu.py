"""The CUDA trainer must agree with `SerialTrainer` on the same device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse import rng
from fedglimpse.federation import models as nets
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.runs.experiment import run
from fedglimpse.simulation.trainers.jobs import (
    Examples,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
)
from fedglimpse.simulation.trainers.serial import SerialTrainer

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from fedglimpse.simulation.cuda.first_layer import first_layer, padded_layer  # noqa: E402
from fedglimpse.simulation.cuda.trainer import GraphedTrainer  # noqa: E402

MODELS = {
    "cifar": (nets.cifar_cnn, (3, 32, 32), 10),
    "fashion": (nets.fashion_cnn, (1, 28, 28), 10),
    "har": (nets.har_mlp, (561,), 6),
}
SIZES = {"equal": [96] * 4, "unequal": [130, 64, 65, 20, 1]}
SGD = TrainingRecipe("sgd", lr=0.01, batch_size=64, epochs=1)
RECIPES = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.9),
    "adam": replace(SGD, optimizer="adam", lr=1e-3),
}


def examples(shape: tuple[int, ...], classes: int, augment: bool) -> Examples:
    """One random picture for each class, with noise; images are bytes."""
    draw = rng.generator(0, "gpu-examples")
    y = torch.randint(classes, (2000,), generator=draw)
    pictures = torch.rand(classes, *shape, generator=draw)
    x = pictures[y] * 150 + torch.rand(2000, *shape, generator=draw) * 100
    x = x.to(torch.uint8) if len(shape) == 3 else x / 100 - 1
    return Examples(x.cuda(), y.cuda(), augment)


def jobs_of(sizes: list[int], mu: float = 0.0) -> TrainingJobs:
    """Clients of these sizes; they start from two states in turn."""
    count = len(sizes)
    rows = torch.randint(2000, (count, max(sizes)), generator=rng.generator(1, "gpu-jobs"))
    jobs = replace(
        TrainingJobs.plain(rows, keys=torch.arange(count) * 7919),
        start=torch.arange(count) % 2,
        sizes=torch.tensor(sizes),
        mu=torch.full((count,), mu),
    )
    return jobs.to(torch.device("cuda"))


def starts(name: str) -> Tensor:
    build, _, _ = MODELS[name]
    states = []
    for seed in range(2):
        with rng.isolated(seed, "gpu-start"):
            model = build()
        states.append(Layout.of(model).read(model))
    return torch.stack(states).cuda()


class Comparison:
    """The GPU trainer and the reference on the same jobs."""

    def __init__(
        self, name: str, recipe: TrainingRecipe, jobs: TrainingJobs, compiled: bool = False
    ) -> None:
        build, shape, classes = MODELS[name]
        self.build = build
        self.data = examples(shape, classes, augment=name == "cifar")
        self.recipe = replace(recipe, augment=self.data.augment)
        self.jobs = jobs
        self.start = starts(name)
        self.serial = self.trained_serially(channels_last=False)
        self.trainer = GraphedTrainer(build().cuda(), self.data, self.recipe, compiled=compiled)
        self.graphed = self.trainer.train(self.start, jobs)

    def trained_serially(self, channels_last: bool) -> TrainingResults:
        """Train with the reference; the memory layout of images changes the order of its sums."""
        model = self.build().cuda()
        trainer = SerialTrainer(model, self.data, self.recipe, channels_last=channels_last)
        return trainer.train(self.start, self.jobs)

    def share_of_update(self, results: TrainingResults) -> float:
        """Return the distance of all states from the reference's, as a share of its update."""
        update = (self.serial.states - self.start[self.jobs.start]).norm()
        return float((self.serial.states - results.states).norm() / update)

    def share_of_model(self, results: TrainingResults) -> float:
        """Return the largest distance of a state, as a share of the model's norm."""
        distances = (self.serial.states - results.states).norm(dim=1)
        return float((distances / self.serial.states.norm(dim=1)).max())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_graphed_equals_serial(name: str, recipe: str, sizes: str) -> None:
    """Within 1e-3 of the update, or of what rounding alone does to the reference.

    BatchNorm behind ReLU amplifies rounding, most of all in a batch of two: the reference itself
    moves by some per cent in a few steps when only its memory layout changes. That distance is
    measured here, not assumed.
    """
    both = Comparison(name, RECIPES[recipe], jobs_of(SIZES[sizes], mu=0.1))
    assert torch.equal(both.serial.steps, both.graphed.steps)
    distance = both.share_of_update(both.graphed)
    rounding = both.share_of_update(both.trained_serially(channels_last=True))
    print(f"{name} {recipe} {sizes}: distance {distance:.1e}, rounding alone {rounding:.1e}")
    assert distance < max(1e-3, 2 * rounding)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_the_papers_recipe_equals_serial(name: str, sizes: str) -> None:
    """Steps of 1e-3 amplify rounding little: after three epochs models are within 1e-3."""
    both = Comparison(name, replace(SGD, lr=1e-3, epochs=3), jobs_of(SIZES[sizes]))
    distance = both.share_of_model(both.graphed)
    of_update = both.share_of_update(both.graphed)
    print(f"{name} {sizes}: {distance:.1e} of the model, {of_update:.1e} of the update")
    assert distance < 1e-3


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_adam_is_as_near_as_rounding_lets_it(name: str, sizes: str) -> None:
    """Adam divides by the size of a gradient, however small: rounding alone goes beyond 1e-3.

    `benchmarks/rounding.py` shows it on a CPU.
    """
    recipe = replace(RECIPES["adam"], epochs=3)
    both = Comparison(name, recipe, jobs_of(SIZES[sizes]), compiled=True)
    distance = both.share_of_model(both.graphed)
    rounding = both.share_of_model(both.trained_serially(channels_last=True))
    print(f"{name} adam {sizes}: {distance:.1e} of the model, rounding alone {rounding:.1e}")
    assert distance < max(1e-3, 2 * rounding)


@pytest.mark.parametrize("compiled", [False, True])
def test_dense_layers_step_by_themselves(compiled: bool) -> None:
    """Without FedProx's penalty: with it, as above, they leave their step to the optimizer."""
    jobs = jobs_of([128, 100, 65, 20, 1])  # no batch of two: see above
    both = Comparison("har", replace(SGD, epochs=3), jobs, compiled)
    self_stepping = [len(step.offsets) for step in both.trainer.steps.values()]
    assert self_stepping == [2]  # not the last layer, which has six outputs
    assert both.share_of_update(both.graphed) < 1e-4
    unchanged = both.start[both.jobs.start][-1]  # one example: no step
    assert torch.equal(both.graphed.states[-1], unchanged)


@pytest.mark.parametrize("name", MODELS)
def test_one_step_equals_serial(name: str) -> None:
    both = Comparison(name, SGD, jobs_of([64, 40, 64]))
    assert both.share_of_update(both.graphed) < 2e-3
    serial, graphed = both.serial, both.graphed
    torch.testing.assert_close(serial.loss, graphed.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(serial.squared_loss, graphed.squared_loss, rtol=1e-4, atol=1e-4)


def first_layer_inputs(
    side: int, inputs: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Images of 4 clients, the layer's four parameters (scales of both signs), real images."""
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=draw)

    x = normal(4, 64, side, side, inputs).to(dtype)
    weight = (normal(4, 32, inputs, 3, 3) / 3).to(dtype).float()
    params = [weight, normal(4, 32) / 3, normal(4, 32) + 0.5, normal(4, 32)]
    counts = torch.tensor([64, 37, 2, 0], device="cuda")
    return x, [param.requires_grad_() for param in params], counts


def plain_first_layer(x: Tensor, params: list[Tensor], pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One client's layer by torch's own operations: y, mean, variance."""
    weight, bias, gamma, beta = params
    r = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1).relu()
    y = F.batch_norm(r, None, None, gamma, beta, training=True, eps=1e-5)
    y = F.max_pool2d(y, 2) if pool else y
    return y.permute(0, 2, 3, 1), r.mean((0, 2, 3)), r.var((0, 2, 3), correction=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("side", "inputs", "pool"), [(28, 1, True), (32, 3, False), (32, 3, True)])
def test_first_layer_against_torch(
    side: int, inputs: int, pool: bool, precision: Precision
) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tolerance = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    x, params, counts = first_layer_inputs(side, inputs, dtype)
    with numerics(x.device, "fp32" if precision == "fp32" else "tf32"):
        y, mean, var = first_layer(x, *params, counts, 1e-5, 1, pool)
        dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        dy = dy.to(dtype)
        grads = torch.autograd.grad(y, params, dy)
    for j, count in enumerate(counts.tolist()):
        job_grads = [grad[j] for grad in grads]
        assert not y[j, count:].any()  # padding
        if count == 0:  # an idle client
            assert not any(grad.any() for grad in job_grads)
            continue
        exact_params = [param[j].detach().double().requires_grad_() for param in params]
        expected = plain_first_layer(x[j, :count].double(), exact_params, pool)
        exact_dy = dy[j, :count].double()
        expected_grads = torch.autograd.grad(expected[0], exact_params, exact_dy)
        results = [y[j, :count], mean[j], var[j], *job_grads]
        for result, exact in zip(results, [*expected, *expected_grads], strict=True):
            assert (result.double() - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("pool", [False, True])
def test_first_layer_is_a_proper_operator(pool: bool) -> None:
    x, params, counts = first_layer_inputs(8, 1, torch.float32)
    torch.library.opcheck(padded_layer, (x, *params, counts, 1e-5, pool))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_runs_repeat_on_the_gpu(precision: str) -> None:
    settings = {
        "method": "glimpse",
        "seeds": [0, 1],
        "rounds": 5,
        "engine.device": "cuda",
        "engine.precision": precision,
    }
    first = run(settings).records
    second = run(settings).records
    for record, repeated in zip(first, second, strict=True):
        assert record["selected"] == repeated["selected"]
        assert record["accuracy"] == repeated["accuracy"]
    assert first[-1]["accuracy"] > 0.2


def test_more_jobs_than_fit_run_in_waves() -> None:
    data = examples((561,), 6, augment=False)
    jobs = jobs_of([40] * 7)
    results = []
    for max_jobs in (None, 3):
        model = nets.har_mlp().cuda()
        trainer = GraphedTrainer(model, data, SGD, max_jobs=max_jobs, compiled=False)
        results.append(trainer.train(starts("har"), jobs))
    at_once, in_waves = results
    torch.testing.assert_close(at_once.states, in_waves.states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["har", "fashion"])  # dense layers; Triton operators
def test_one_compilation_serves_any_number_of_clients(name: str) -> None:
    build, shape, classes = MODELS[name]
    data = examples(shape, classes, augment=False)
    start = starts(name)
    GraphedTrainer(build().cuda(), data, SGD).train(start, jobs_of([40] * 3))
    graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for count in (5, 12):
        GraphedTrainer(build().cuda(), data, SGD).train(start, jobs_of([40] * count))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs_before
