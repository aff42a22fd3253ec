"""`BatchedTrainer` must agree with `SerialTrainer`, and that one with a loop written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.errors import UserError
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import (
    Examples,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
)
from fedglimpse.simulation.trainers.objectives import blocks_of, layer_of, serpentine
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.types import LocalObjective

CLASSES = 5
SGD = TrainingRecipe("sgd", lr=0.01, batch_size=8, epochs=3)
MOMENTUM = replace(SGD, lr=0.005, momentum=0.9, weight_decay=0.01)
ADAM = TrainingRecipe("adam", lr=0.001, batch_size=8, epochs=3)
RECIPES = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM}
# 17 and 9 end in a batch of one example, 1 takes no step, 5 is smaller than a batch
SIZES = {"equal": (16, 16, 16), "unequal": (9, 17, 1, 5, 16, 3)}
MODELS = ("cnn-batch", "cnn-group", "tanh-batch", "mlp-batch", "mlp-group")
OBJECTIVES = {
    "plain": LocalObjective(),
    "prox": LocalObjective(proximal_mu=0.5),
    "prox_unsquared": LocalObjective(proximal_mu=0.05, proximal_squared=False),
    "distill": LocalObjective(distill=0.6, temperature=3.0),
    "block": LocalObjective(block_cycle=True),
    "all": LocalObjective(0.1, True, 0.5, 2.0, True),
}


# A bias whose ReLU is active on a whole batch is undone by the BatchNorm behind it: its gradient is
# rounding noise, which Adam blows up to full steps. So these cases say nothing about trainers; Adam
# with BatchNorm is compared on a network with Tanh, where no such bias exists.
NOISE = [(m, "adam") for m in ("cnn-batch", "mlp-batch")]
CASES = [(m, r) for m in MODELS for r in RECIPES if (m, r) not in NOISE]


def mini_cnn(norm: nets.Norm, bend: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    def normal(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(2, width)

    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), bend(), normal(4), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3), bend(), normal(6), nn.Flatten()),
        *(nn.Linear(24, 8), nn.Linear(8, CLASSES)),
    )


def build(name: str, norm: nets.Norm, seed: int = 0) -> nn.Module:
    with rng.isolated(seed, "test"):
        return {
            "cnn": lambda: mini_cnn(norm),
            "tanh": lambda: mini_cnn(norm, nn.Tanh),
            "mlp": lambda: nets.digits_mlp(norm, CLASSES),
            "fashion": lambda: nets.fashion_cnn(norm),
            "har": lambda: nets.har_mlp(norm),
        }[name]()


def images(side: int = 8, classes: int = CLASSES, augment: bool = False) -> Examples:
    """Noisy pictures with one bright row for each class.

    Floats: equal bytes would tie in max-pooling, where rounding decides who gets the gradient.
    """
    y = torch.arange(60) % classes
    x = torch.randn(60, 1, side, side, generator=rng.generator(1, "images"))
    x[torch.arange(60), 0, y % side] += 2
    return Examples(x, y, augment)


def byte_images(augment: bool = False) -> Examples:
    """The same as images usually are, in bytes."""
    whole = images(augment=augment)
    return replace(whole, x=(whole.x * 40 + 100).clamp(0, 255).to(torch.uint8))


def features(width: int, classes: int) -> Examples:
    y = torch.arange(60) % classes
    x = torch.randn(60, width, generator=rng.generator(0, "features"))
    x[torch.arange(60), y] += 3
    return Examples(x, y, augment=False)


def jobs_of(
    sizes: Sequence[int], objectives: Sequence[LocalObjective], starts: int = 1
) -> TrainingJobs:
    """Clients with overlapping rows; objectives and start rows go around."""
    count = len(sizes)
    each = [objectives[j % len(objectives)] for j in range(count)]
    rows = (torch.arange(max(sizes)) + 7 * torch.arange(count)[:, None]) % 60
    keys = torch.tensor([rng.key(3, "train", j) for j in range(count)])
    return replace(
        TrainingJobs.plain(rows, keys),
        start=torch.arange(count) % starts,
        sizes=torch.tensor(sizes),
        mu=torch.tensor([o.proximal_mu for o in each]),
        squared=torch.tensor([o.proximal_squared for o in each]),
        distill=torch.tensor([o.distill for o in each]),
        temperature=torch.tensor([o.temperature for o in each]),
        visit=torch.tensor([j if o.block_cycle else -1 for j, o in enumerate(each)]),
    )


def starts_of(name: str, norm: nets.Norm, count: int) -> Tensor:
    """Start states with running statistics away from 0 and 1."""
    models = [build(name, norm, seed) for seed in range(count)]
    for seed, model in enumerate(models):
        draw = rng.generator(seed, "statistics")
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=draw))
            elif key.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=draw))
    return torch.stack([Layout.of(m).read(m) for m in models])


def assert_same(
    one: TrainingResults, other: TrainingResults, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    torch.testing.assert_close(one.states, other.states, rtol=rtol, atol=atol)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.squared_loss, other.squared_loss, rtol=1e-4, atol=1e-5)
    assert one.steps.tolist() == other.steps.tolist()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_batched_agrees_with_serial(model: str, sizes: str, recipe: str, objective: str) -> None:
    name, norm = model.split("-")
    examples, jobs = images(), jobs_of(SIZES[sizes], [OBJECTIVES[objective]])
    start = starts_of(name, norm, 1)
    one = SerialTrainer(build(name, norm), examples, RECIPES[recipe]).train(start, jobs)
    other = BatchedTrainer(build(name, norm), examples, RECIPES[recipe]).train(start, jobs)
    assert_same(one, other)
    moved = (one.states != start).any(1)
    assert moved.tolist() == (one.steps > 0).tolist() == [s > 1 for s in SIZES[sizes]]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_the_arithmetic_is_the_same(model: str, recipe: str, objective: str) -> None:
    """In float64 nothing but the last digits may differ."""
    name, norm = model.split("-")
    whole = images()
    examples = replace(whole, x=whole.x.double())
    jobs, start = jobs_of((9, 17, 1, 5, 16, 2), [OBJECTIVES[objective]]), starts_of(name, norm, 1)
    pair = [
        kind(build(name, norm).double(), examples, RECIPES[recipe]).train(start.double(), jobs)
        for kind in (SerialTrainer, BatchedTrainer)
    ]
    assert pair[0].states.dtype == torch.float64
    assert_same(*pair, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_lanes_with_different_objectives_agree(model: str, recipe: str) -> None:
    name, norm = model.split("-")
    examples = images(augment=True)
    jobs = jobs_of((9, 17, 1, 5, 16, 3, 12, 12), list(OBJECTIVES.values()), starts=3)
    start = starts_of(name, norm, 3)
    serial = SerialTrainer(build(name, norm), examples, RECIPES[recipe])
    batched = BatchedTrainer(build(name, norm), examples, RECIPES[recipe])
    together = serial.train(start, jobs)
    assert_same(together, batched.train(start, jobs))
    for lane in range(3):  # lanes together equal lanes alone, bit for bit
        mine = (jobs.start == lane).nonzero().flatten()
        alone = serial.train(
            start[lane : lane + 1], replace(jobs.pick(mine), start=torch.zeros_like(mine))
        )
        assert torch.equal(alone.states, together.states[mine])
        assert torch.equal(alone.loss, together.loss[mine])


@pytest.mark.parametrize("max_jobs", [1, 2, 4, 100])
def test_waves_give_the_same(max_jobs: int) -> None:
    examples, start = images(), starts_of("cnn", "batch", 2)
    jobs = jobs_of(SIZES["unequal"], [OBJECTIVES["plain"], OBJECTIVES["prox"]], starts=2)
    whole = BatchedTrainer(build("cnn", "batch"), examples, MOMENTUM)
    parts = BatchedTrainer(build("cnn", "batch"), examples, MOMENTUM, max_jobs=max_jobs)
    widths = []
    train_wave = parts._train_wave

    def watched(named_start, jobs, part, positions, sums):  # type: ignore[no-untyped-def]
        widths.append(len(jobs))
        return train_wave(named_start, jobs, part, positions, sums)

    parts._train_wave = watched  # type: ignore[method-assign]
    assert_same(whole.train(start, jobs), parts.train(start, jobs))
    assert max(widths) <= max_jobs
    assert sum(widths) == len(jobs)


def test_max_jobs_must_be_positive_and_no_jobs_are_fine() -> None:
    with pytest.raises(UserError, match="max_jobs=0"):
        BatchedTrainer(build("cnn", "batch"), images(), SGD, max_jobs=0)
    start = starts_of("cnn", "batch", 1)
    nobody = jobs_of((4, 4), [LocalObjective()]).pick(torch.tensor([], dtype=torch.long))
    for kind in (SerialTrainer, BatchedTrainer):
        trained = kind(build("cnn", "batch"), images(), SGD).train(start, nobody)
        assert trained.states.shape == (0, start.shape[1])
        assert len(trained.loss) == len(trained.squared_loss) == len(trained.steps) == 0


@pytest.mark.parametrize("name", ["fashion", "har"])
@pytest.mark.parametrize(("dtype", "lr"), [(torch.float32, 5e-5), (torch.float64, 0.01)])
def test_real_models_agree(name: str, dtype: torch.dtype, lr: float) -> None:
    """Small steps in float32: among 100,000 pooling windows some tie but for rounding."""
    whole = images(28, 10) if name == "fashion" else features(561, 6)
    examples = replace(whole, x=whole.x.to(dtype))
    recipe = TrainingRecipe("sgd", lr, momentum=0.9, batch_size=4, epochs=3)
    jobs = jobs_of((7, 4, 5), [LocalObjective(), OBJECTIVES["distill"]], starts=2)
    start = starts_of(name, "batch", 2).to(dtype)
    one = SerialTrainer(build(name, "batch").to(dtype), examples, recipe, channels_last=True)
    other = BatchedTrainer(build(name, "batch").to(dtype), examples, recipe)
    tolerance = {} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert_same(one.train(start, jobs), other.train(start, jobs), **tolerance)


@pytest.mark.parametrize("augment", [False, True])
def test_bytes_become_the_same_input(augment: bool) -> None:
    jobs, start = jobs_of((9, 17), [LocalObjective()]), starts_of("mlp", "group", 1)
    pair = [
        kind(build("mlp", "group"), byte_images(augment), SGD).train(start, jobs)
        for kind in (SerialTrainer, BatchedTrainer)
    ]
    assert_same(*pair)


def by_hand(
    model: nn.Module, job: TrainingJobs, examples: Examples, recipe: TrainingRecipe
) -> list[Tensor]:
    """Train `model` as any tutorial would; returns the losses of all examples met."""
    size, batch_size = int(job.sizes), recipe.batch_size
    if recipe.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), recipe.lr)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
        )
    losses = []
    model.train()
    for epoch in range(recipe.epochs):
        order = rng.permutations(job.keys, epoch, job.sizes, size)[0]
        for rows in job.rows[0, :size][order].split(batch_size):
            if len(rows) == 1:
                continue
            x, y = examples.x[rows].float() / 255, examples.y[rows]
            optimizer.zero_grad()
            logits = model(x)
            losses.append(F.cross_entropy(logits.detach(), y, reduction="none"))
            F.cross_entropy(logits, y).backward()
            optimizer.step()
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_serial_is_a_plain_torch_loop(norm: nets.Norm, recipe: str) -> None:
    examples, jobs = byte_images(), jobs_of((17, 6), [LocalObjective()])
    start = starts_of("cnn", norm, 1)
    trained = SerialTrainer(build("cnn", norm), examples, RECIPES[recipe]).train(start, jobs)
    for j in range(2):
        model = build("cnn", norm)
        layout = Layout.of(model)
        layout.write(start[0], model)
        losses = by_hand(model, jobs.pick(torch.tensor([j])), examples, RECIPES[recipe])
        assert torch.equal(layout.read(model), trained.states[j])
        every = torch.cat(losses)
        means = torch.stack([part.mean() for part in losses])
        torch.testing.assert_close(trained.loss[j], means.mean())
        torch.testing.assert_close(trained.squared_loss[j], every.square().mean())
        assert int(trained.steps[j]) == len(losses)


@pytest.mark.parametrize("kind", [SerialTrainer, BatchedTrainer])
def test_terms_of_weight_zero_change_nothing(kind: type) -> None:
    examples, start = images(), starts_of("cnn", "batch", 1)
    trainer = kind(build("cnn", "batch"), examples, SGD)
    plain = trainer.train(start, jobs_of((9, 17, 5), [LocalObjective()]))
    zero = LocalObjective(proximal_mu=0.0, proximal_squared=False, distill=0.0, temperature=9.0)
    assert torch.equal(plain.states, trainer.train(start, jobs_of((9, 17, 5), [zero])).states)


@pytest.mark.parametrize("kind", [SerialTrainer, BatchedTrainer])
@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_blocks_stay_bit_for_bit(kind: type, recipe: str) -> None:
    model = build("cnn", "batch")
    layout, blocks = Layout.of(model), blocks_of(model)
    assert len(blocks) == 4
    start = starts_of("cnn", "batch", 1)
    recipe_of = replace(RECIPES[recipe], weight_decay=0.1)
    count = 2 * len(blocks)
    jobs = jobs_of([9] * count, [LocalObjective(proximal_mu=0.1, block_cycle=True)])
    trained = kind(model, images(), recipe_of).train(start, jobs).states
    for j in range(count):
        mine = blocks[serpentine(j, len(blocks))]
        for entry in layout.entries:
            part = slice(entry.start, entry.stop)
            same = torch.equal(trained[j, part], start[0, part])
            assert same == (layer_of(entry.name) not in mine), (j, entry.name)


def test_a_whole_training_follows_a_block_training() -> None:
    """The serial trainer's one model must not stay frozen."""
    start, trainer = (
        starts_of("cnn", "batch", 1),
        SerialTrainer(build("cnn", "batch"), images(), SGD),
    )
    jobs = jobs_of((9, 9), [LocalObjective(block_cycle=True), LocalObjective()])
    alone = trainer.train(start, jobs.pick(torch.tensor([1]))).states
    assert torch.equal(trainer.train(start, jobs).states[1], alone[0])


@pytest.mark.parametrize("kind", [SerialTrainer, BatchedTrainer])
def test_distillation_by_hand(kind: type) -> None:
    """One step of one batch: SGD on the mixed loss, the teacher in evaluation mode."""
    examples, share, heat = images(), 0.3, 2.5
    start = starts_of("cnn", "batch", 1)
    recipe = TrainingRecipe("sgd", lr=0.1, batch_size=8, epochs=1)
    jobs = jobs_of((8,), [LocalObjective(distill=share, temperature=heat)])
    trained = kind(build("cnn", "batch"), examples, recipe).train(start, jobs)
    model, teacher = build("cnn", "batch"), build("cnn", "batch")
    layout = Layout.of(model)
    layout.write(start[0], model.train())
    layout.write(start[0], teacher.eval())
    rows = jobs.rows[0][rng.permutations(jobs.keys, 0, jobs.sizes, 8)[0]]
    x, y = examples.x[rows], examples.y[rows]
    logits, target = model(x), teacher(x).detach()
    kl = F.kl_div(
        (logits / heat).log_softmax(1),
        (target / heat).log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )
    own = F.cross_entropy(logits, y)
    ((1 - share) * own + share * heat**2 * kl).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(trained.states[0], layout.read(model), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained.loss[0], own.detach())
