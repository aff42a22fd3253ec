"""Steps per second of 16 lanes of one world against 16 environments in a Python loop, HAR MLP.

Run: python benchmarks/environment.py [--device cuda] [--lanes 16] [key=value ...]
Both sides make the calls that `ClientSelection` and `ClientSelectionVector` make, so that
gymnasium need not be there. Writes benchmarks/results/environment.json, one entry for each device.
The sides take turns, and each lives alone in its turn, as it does where somebody uses it. Steps are
timed from outside: an environment works its books out while the next clients train, and a clock
inside would make it wait. How much is local training is measured in rounds of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedglimpse.config.loading import parse_words
from fedglimpse.env.arrays import Shape, as_arrays, chosen_slots, info_of
from fedglimpse.env.settings import Settings, settings_of
from fedglimpse.env.stepper import LaneStepper
from fedglimpse.runs.build import WorldSetup

RESULT = Path(__file__).parent / "results" / "environment.json"
TARGET = 8.0  # times as many steps per second
TURN = 10  # steps of one side before those of the other


class Lanes:
    """A stepper with the arrays that go in and out of an environment."""

    def __init__(self, settings: Settings, seeds: list[int], setup: WorldSetup) -> None:
        self.stepper = LaneStepper(settings, len(seeds), setup)
        self.shape = Shape.of(self.stepper)
        self.stepper.restart(dict(enumerate(seeds)))
        self.stepper.observe()

    def step(self, actions: np.ndarray) -> object:
        """Run one round of every lane."""
        stepper = self.stepper
        chosen = [
            chosen_slots(action, observation, stepper.k, subset=False)
            for action, observation in zip(actions, stepper.observations, strict=True)
        ]
        steps = stepper.step(chosen)
        infos = list(map(info_of, stepper.observations, steps))
        return as_arrays(stepper.observations, self.shape), infos


class Clock:
    """Counts the seconds of a trainer, while it is in use."""

    def __init__(self, trainer: Any) -> None:
        self.seconds, self._trainer, self._train = 0.0, trainer, trainer.train

    def __enter__(self) -> Clock:
        self._trainer.train = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.train = self._train

    def _timed(self, *arguments: Any) -> Any:
        began = now()
        answer = self._train(*arguments)
        self.seconds += now() - began
        return answer


def now() -> float:
    """Return the time when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def play(sides: list[Lanes], actions: np.ndarray) -> float:
    """Play one step of every lane; returns its seconds."""
    began, at = now(), 0
    for side in sides:
        side.step(actions[at : at + side.stepper.num_lanes])
        at += side.stepper.num_lanes
    return now() - began


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def time_steps(sides: list[Lanes], actions: np.ndarray, warm_up: int) -> tuple[list[float], float]:
    """Return the seconds of every step after the first ones, and those of a step's training."""
    for some in actions[:warm_up]:
        play(sides, some)
    whole = [play(sides, some) for some in actions[warm_up:]]
    with Clock(sides[0].stepper.world.trainer) as clock:
        for some in actions[:warm_up]:
            play(sides, some)
    return whole, clock.seconds / warm_up


def measure(words: argparse.Namespace) -> dict[str, Any]:
    lanes, warm_up = words.lanes, words.warm_up
    config = {"data.name": "hapt", "method": "fedavg-window", "engine.device": words.device}
    settings = settings_of(config | parse_words(words.keys))
    setup = WorldSetup.of(settings.config)
    seeds = list(range(lanes))
    sides: dict[str, Callable[[], list[Lanes]]] = {
        "vector": lambda: [Lanes(settings, seeds, setup)],
        "loop": lambda: [Lanes(settings, [seed], setup) for seed in seeds],
    }
    slots = sides["vector"]()[0].shape.slots
    draw = np.random.Generator(np.random.PCG64(0))
    steps: dict[str, list[float]] = {name: [] for name in sides}
    trainings: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(-(-words.rounds // TURN)):  # a busy machine is busy for both sides
        actions = draw.uniform(-1, 1, (warm_up + TURN, lanes, slots)).astype(np.float32)
        for name, build in sides.items():
            seconds, of_training = time_steps(build(), actions, warm_up)
            steps[name] += seconds
            trainings[name].append(of_training)
    whole, training = (
        {name: statistics.median(some) for name, some in found.items()}
        for found in (steps, trainings)
    )
    result: dict[str, Any] = {
        **machine(words.device),
        "what": "HAR MLP on hapt; all visible clients train and send sketches of their updates",
        "keys": words.keys,
        "lanes": lanes,
        "rounds_measured": len(steps["loop"]),
        "target_ratio": TARGET,
    }
    for name in sides:
        result[name] = {
            "steps_per_second": round(lanes / whole[name], 1),
            "milliseconds_per_step": round(1e3 * whole[name] / lanes, 2),
            "of_them_training": round(1e3 * training[name] / lanes, 2),
        }
    speeds = (result[name]["steps_per_second"] for name in ("vector", "loop"))
    result["ratio"] = round(next(speeds) / next(speeds), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("keys", nargs="*", help="key=value, as for `fedglimpse run`")
    words = parser.parse_args()
    result = measure(words)
    known = json.loads(words.out.read_text()) if words.out.exists() else {}
    words.out.parent.mkdir(parents=True, exist_ok=True)
    words.out.write_text(json.dumps({**known, words.device: result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
