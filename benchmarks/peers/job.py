"""The job that every contestant does: the same model, data, local training and test set.

A contestant is a script of this folder. It is run as `python run_<name>.py --case fashion`, plays
rounds through its framework's public interface, and prints the seconds of each as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedglimpse.federation.models import fashion_cnn, har_mlp

EPOCHS, BATCH, LR = 3, 64, 0.01
TEST_BATCH = 256  # of every contestant that lets its user choose; larger ones are slower on a CPU


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int  # of every client
    test: int

    def scaled(self, scale: float) -> Case:
        """Return a smaller case, to try the scripts."""
        samples, test = max(2 * BATCH, round(self.samples * scale)), round(self.test * scale)
        return replace(self, samples=samples, test=max(BATCH, test))

    def data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random x_train, y_train, x_test, y_test, the same in every process.

        Images are float32 in 0..1, all values that a byte can take; features are normal.
        """
        draw = torch.Generator().manual_seed(0)
        parts: list[Tensor] = []
        for count in (self.clients * self.samples, self.test):
            if len(self.shape) == 3:
                x = torch.randint(256, (count, *self.shape), generator=draw) / 255
            else:
                x = torch.randn(count, *self.shape, generator=draw)
            parts += [x, torch.randint(self.classes, (count,), generator=draw)]
        return parts[0], parts[1], parts[2], parts[3]

    def client(self, client: int) -> slice:
        """Return the rows of one client."""
        return slice(client * self.samples, (client + 1) * self.samples)


CASES = {
    "fashion": Case("fashion", fashion_cnn, (1, 28, 28), 10, clients=5, samples=600, test=10_000),
    "har": Case("har", har_mlp, (561,), 6, clients=10, samples=350, test=2_947),
}


def gaps(moments: Sequence[float]) -> list[float]:
    """Return the seconds between moments."""
    return [after - before for before, after in pairwise(moments)]


def contest(version: str, play: Callable[[Case, int, int], list[float]]) -> None:
    """Read the command line, play the rounds and print their seconds, the last line of stdout.

    Args:
        version: of the framework.
        play: (case, rounds, threads) -> seconds of every round, from the first.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    case = CASES[words.case]
    case = case if words.scale == 1 else case.scaled(words.scale)
    seconds = play(case, words.rounds, words.threads)
    assert len(seconds) == words.rounds, f"{len(seconds)} rounds of {words.rounds}"
    print("\n" + json.dumps({"version": version, "seconds": seconds}), flush=True)
    os._exit(0)  # without waiting for a framework's background threads
