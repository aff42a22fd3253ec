"""The CUDA trainer must agree with `SerialTrainer` on the same device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedglimpse import rng
from fedglimpse.federation import models as nets
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.runs.experiment import run
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs, TrainingRecipe
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
    """One random picture for each class, with noise."""
    draw = rng.generator(0, "gpu-examples")
    y = torch.randint(classes, (2000,), generator=draw)
    x = torch.rand(classes, *shape, generator=draw)[y] * 150
    x = x + torch.rand(2000, *shape, generator=draw) * 100
    x = x.to(torch.uint8) if len(shape) == 3 else x / 100 - 1
    return Examples(x.cuda(), y.cuda(), augment)


def jobs_of(sizes: list[int], mu: float = 0.0) -> TrainingJobs:
    count, zeros = len(sizes), torch.zeros(len(sizes))
    draw = rng.generator(1, "gpu-jobs")
    jobs = TrainingJobs(
        start=torch.arange(count) % 2,
        keys=torch.arange(count) * 7919,
        rows=torch.randint(2000, (count, max(sizes)), generator=draw),
        sizes=torch.tensor(sizes),
        mu=zeros + mu,
        squared=torch.ones(count, dtype=torch.bool),
        distill=zeros,
        temperature=zeros,
        visit=zeros.long() - 1,
    )
    return jobs.to(torch.device("cuda"))


def starts(name: str) -> torch.Tensor:
    rows = []
    for seed in range(2):
        with rng.isolated(seed, "gpu-start"):
            model = MODELS[name][0]()
        rows.append(Layout.of(model).read(model))
    return torch.stack(rows).cuda()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_graphed_equals_serial(name: str, recipe: str, sizes: str) -> None:
    """Within 1e-3 of the update, or of what rounding alone does to the reference.

    BatchNorm behind ReLU amplifies rounding, most of all in a batch of two: the reference itself
    moves by some per cent in a few steps when only its memory layout changes. That distance is
    measured here, not assumed.
    """
    net, shape, classes = MODELS[name]
    data = examples(shape, classes, augment=name == "cifar")
    how = replace(RECIPES[recipe], augment=data.augment)
    jobs, start = jobs_of(SIZES[sizes], mu=0.1), starts(name)
    slow = SerialTrainer(net().cuda(), data, how).train(start, jobs)
    other = SerialTrainer(net().cuda(), data, how, channels_last=True).train(start, jobs)
    fast = GraphedTrainer(net().cuda(), data, how, compiled=False).train(start, jobs)
    assert torch.equal(slow.steps, fast.steps)
    moved = (slow.states - start[jobs.start]).norm()
    away = (slow.states - fast.states).norm() / moved
    floor = (slow.states - other.states).norm() / moved
    print(f"{name} {recipe} {sizes}: distance {away:.1e}, rounding alone {floor:.1e}")
    assert away < max(1e-3, 2 * float(floor))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_the_papers_recipe_equals_serial(name: str, sizes: str) -> None:
    """Steps of 1e-3 amplify rounding little: after three epochs models are within 1e-3."""
    net, shape, classes = MODELS[name]
    data = examples(shape, classes, augment=name == "cifar")
    how = replace(SGD, lr=1e-3, epochs=3, augment=data.augment)
    jobs, start = jobs_of(SIZES[sizes]), starts(name)
    slow = SerialTrainer(net().cuda(), data, how).train(start, jobs)
    fast = GraphedTrainer(net().cuda(), data, how, compiled=False).train(start, jobs)
    away = (slow.states - fast.states).norm(dim=1) / slow.states.norm(dim=1)
    of_update = (slow.states - fast.states).norm() / (slow.states - start[jobs.start]).norm()
    print(f"{name} {sizes}: {float(away.max()):.1e} of the model, {of_update:.1e} of the update")
    assert float(away.max()) < 1e-3


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_adam_is_as_near_as_rounding_lets_it(name: str, sizes: str) -> None:
    """Adam divides by the size of a gradient, however small: rounding alone goes beyond 1e-3.

    `benchmarks/rounding.py` shows it on a CPU.
    """
    net, shape, classes = MODELS[name]
    data = examples(shape, classes, augment=name == "cifar")
    how = replace(RECIPES["adam"], epochs=3, augment=data.augment)
    jobs, start = jobs_of(SIZES[sizes]), starts(name)
    slow = SerialTrainer(net().cuda(), data, how).train(start, jobs)
    other = SerialTrainer(net().cuda(), data, how, channels_last=True).train(start, jobs)
    fast = GraphedTrainer(net().cuda(), data, how).train(start, jobs)
    size = slow.states.norm(dim=1)
    away, floor = (
        float(((slow.states - some.states).norm(dim=1) / size).max()) for some in (fast, other)
    )
    print(f"{name} adam {sizes}: {away:.1e} of the model, rounding alone {floor:.1e}")
    assert away < max(1e-3, 2 * floor)


@pytest.mark.parametrize("compiled", [False, True])
def test_dense_layers_step_by_themselves(compiled: bool) -> None:
    """Without FedProx's pull: with it, as above, they leave their step to the optimizer."""
    data, how = examples((561,), 6, augment=False), replace(SGD, epochs=3)
    jobs, start = jobs_of([128, 100, 65, 20, 1]), starts("har")  # no batch of two: see above
    slow = SerialTrainer(nets.har_mlp().cuda(), data, how).train(start, jobs)
    trainer = GraphedTrainer(nets.har_mlp().cuda(), data, how, compiled=compiled)
    fast = trainer.train(start, jobs)
    assert [len(step.offsets) for step in trainer.steps.values()] == [2]  # not the six outputs
    moved = (slow.states - start[jobs.start]).norm()
    assert (slow.states - fast.states).norm() / moved < 1e-4
    assert torch.equal(fast.states[-1], start[jobs.start][-1])  # one example: no step


@pytest.mark.parametrize("name", MODELS)
def test_one_step_equals_serial(name: str) -> None:
    net, shape, classes = MODELS[name]
    data = examples(shape, classes, augment=name == "cifar")
    jobs, start = jobs_of([64, 40, 64]), starts(name)
    how = replace(SGD, augment=data.augment)
    slow = SerialTrainer(net().cuda(), data, how).train(start, jobs)
    fast = GraphedTrainer(net().cuda(), data, how, compiled=False).train(start, jobs)
    moved = (slow.states - start[jobs.start]).norm()
    assert (slow.states - fast.states).norm() / moved < 2e-3
    torch.testing.assert_close(slow.loss, fast.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slow.squared_loss, fast.squared_loss, rtol=1e-4, atol=1e-4)


def first_layer_inputs(
    side: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Images of 4 clients, the layer's four parameters (scales of both signs), real images."""
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=draw)

    x = normal(4, 64, side, side, inputs).to(dtype)
    weight = (normal(4, 32, inputs, 3, 3) / 3).to(dtype).float()
    params = [weight, normal(4, 32) / 3, normal(4, 32) + 0.5, normal(4, 32)]
    counts = torch.tensor([64, 37, 2, 0], device="cuda")
    return x, [p.requires_grad_() for p in params], counts


def plain_first_layer(
    x: torch.Tensor, params: list[torch.Tensor], pool: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    limit = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    x, params, counts = first_layer_inputs(side, inputs, dtype)
    with numerics(x.device, "fp32" if precision == "fp32" else "tf32"):
        y, mean, var = first_layer(x, *params, counts, 1e-5, 1, pool)
        dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        dy = dy.to(dtype)
        grads = torch.autograd.grad(y, params, dy)
    for j, count in enumerate(counts.tolist()):
        assert not y[j, count:].any()  # padding
        if count == 0:  # an idle client
            assert not any(g[j].any() for g in grads)
            continue
        own = [p[j].detach().double().requires_grad_() for p in params]
        want = plain_first_layer(x[j, :count].double(), own, pool)
        wanted = [*want, *torch.autograd.grad(want[0], own, dy[j, :count].double())]
        got = [y[j, :count], mean[j], var[j], *(g[j] for g in grads)]
        for a, b in zip(got, wanted, strict=True):
            assert (a.double() - b).norm() / b.norm() < limit


@pytest.mark.parametrize("pool", [False, True])
def test_first_layer_is_a_proper_operator(pool: bool) -> None:
    x, params, counts = first_layer_inputs(8, 1, torch.float32)
    torch.library.opcheck(padded_layer, (x, *params, counts, 1e-5, pool))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_runs_repeat_on_the_gpu(precision: str) -> None:
    settings = {"engine.device": "cuda", "engine.precision": precision, "rounds": 5}
    first, second = (run({**settings, "method": "glimpse", "seeds": [0, 1]}) for _ in range(2))
    assert [r["selected"] for r in first.records] == [r["selected"] for r in second.records]
    assert [r["accuracy"] for r in first.records] == [r["accuracy"] for r in second.records]
    assert first.records[-1]["accuracy"] > 0.2


def test_more_jobs_than_fit_run_in_waves() -> None:
    data = examples((561,), 6, augment=False)
    jobs, start = jobs_of([40] * 7), starts("har")
    whole = GraphedTrainer(nets.har_mlp().cuda(), data, SGD, compiled=False).train(start, jobs)
    waves = GraphedTrainer(
        nets.har_mlp().cuda(), data, SGD, max_jobs=3, compiled=False
    ).train(start, jobs)  # fmt: skip
    torch.testing.assert_close(whole.states, waves.states, rtol=1e-4, atol=1e-5)


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
