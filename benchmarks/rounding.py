"""How far rounding alone carries a round of local training: python benchmarks/rounding.py.

The plain loop against itself in another memory layout (dense models: all clients at once), float32,
four clients of 96 examples or five of 1 to 130, three epochs of batches of 64. Only the order of
sums differs. Printed: the largest distance of a client's model, as a share of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer

MODELS = {
    "CIFAR-10": (nets.cifar_cnn, (3, 32, 32), 10),
    "Fashion-MNIST": (nets.fashion_cnn, (1, 28, 28), 10),
    "HAR": (nets.har_mlp, (561,), 6),
}
SIZES = {"equal": [96] * 4, "unequal": [130, 64, 65, 20, 1]}
RECIPES = {
    "SGD 1e-3": TrainingRecipe("sgd", lr=1e-3, epochs=3),
    "Adam 1e-3": TrainingRecipe("adam", lr=1e-3, epochs=3),
}


def examples(shape: tuple[int, ...], classes: int) -> Examples:
    """One random picture for each class, with noise."""
    draw = rng.generator(0, "rounding")
    y = torch.randint(classes, (2000,), generator=draw)
    x = torch.rand(classes, *shape, generator=draw)[y] * 150
    x = x + torch.rand(2000, *shape, generator=draw) * 100
    return Examples(x.to(torch.uint8) if len(shape) == 3 else x / 100 - 1, y, augment=False)


def jobs_of(sizes: list[int]) -> TrainingJobs:
    """Return clients with random rows, all from the same model."""
    rows = torch.randint(2000, (len(sizes), max(sizes)), generator=rng.generator(1, "rounding"))
    plain = TrainingJobs.plain(rows, torch.arange(len(sizes)) * 7919)
    return TrainingJobs(**{**vars(plain), "sizes": torch.tensor(sizes)})


def distance(name: str, recipe: TrainingRecipe, sizes: list[int]) -> float:
    """Train twice; return how far the two are apart."""
    net, shape, classes = MODELS[name]
    data, jobs = examples(shape, classes), jobs_of(sizes)
    torch.manual_seed(0)
    start = state_of(net())[None]
    one = SerialTrainer(net(), data, recipe).train(start, jobs).states
    if len(shape) == 3:
        two = SerialTrainer(net(), data, recipe, channels_last=True).train(start, jobs).states
    else:
        two = BatchedTrainer(net(), data, recipe).train(start, jobs).states
    return float(((one - two).norm(dim=1) / one.norm(dim=1)).max())


def state_of(model: nn.Module) -> Tensor:
    """Return a model as a flat row."""
    return Layout.of(model).read(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| model | recipe | equal clients | unequal clients |\n|---|---|---|---|")
    for name in MODELS:
        for how, recipe in RECIPES.items():
            cells = [f"{distance(name, recipe, sizes):.1e}" for sizes in SIZES.values()]
            print(f"| {name} | {how} | {' | '.join(cells)} |", flush=True)
