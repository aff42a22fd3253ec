"""Steps per second of 16 lanes of one world against 16 environments in a Python loop, HAR MLP.

Run: python benchmarks/environment.py [--device cuda] [--lanes 16] [key=value ...]
Both sides make the calls that `ClientSelection` and `ClientSelectionVector` make, without
gymnasium. Writes benchmarks/results/environment.json, one entry for each device.
The sides take turns, and only one exists at a time. Steps are timed from outside: an environment
computes its records while the next clients train, and a clock inside would make it wait. The share
of local training is measured in rounds of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedglimpse.config.loading import parse_overrides
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
        slots = []
        for action, observation in zip(actions, stepper.observations, strict=True):
            slots.append(chosen_slots(action, observation, stepper.k, subset=False))
        steps = stepper.step(slots)
        infos = list(map(info_of, stepper.observations, steps))
        return as_arrays(stepper.observations, self.shape), infos


class TrainingClock:
    """Counts the seconds of a trainer inside a `with` block."""

    def __init__(self, trainer: Any) -> None:
        self.seconds = 0.0
        self._trainer = trainer
        self._train = trainer.train

    def __enter__(self) -> TrainingClock:
        self._trainer.train = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.train = self._train

    def _timed(self, *arguments: Any) -> Any:
        start = now()
        trained = self._train(*arguments)
        self.seconds += now() - start
        return trained


def now() -> float:
    """Return the time when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def step_all(environments: list[Lanes], actions: np.ndarray) -> float:
    """Run one step of every lane; returns its seconds."""
    start = now()
    first = 0
    for environment in environments:
        last = first + environment.stepper.num_lanes
        environment.step(actions[first:last])
        first = last
    return now() - start


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def time_steps(
    environments: list[Lanes], actions: np.ndarray, warm_up: int
) -> tuple[list[float], float]:
    """Return the seconds of every step after the first ones, and those of a step's training."""
    for action in actions[:warm_up]:
        step_all(environments, action)
    seconds = [step_all(environments, action) for action in actions[warm_up:]]
    with TrainingClock(environments[0].stepper.world.trainer) as clock:
        for action in actions[:warm_up]:
            step_all(environments, action)
    return seconds, clock.seconds / warm_up


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns."""
    lanes = options.lanes
    config = {"data.name": "hapt", "method": "fedavg-window", "engine.device": options.device}
    settings = settings_of(config | parse_overrides(options.keys))
    setup = WorldSetup.of(settings.config)
    seeds = list(range(lanes))
    sides: dict[str, Callable[[], list[Lanes]]] = {
        "vector": lambda: [Lanes(settings, seeds, setup)],
        "loop": lambda: [Lanes(settings, [seed], setup) for seed in seeds],
    }
    slots = sides["vector"]()[0].shape.slots
    draw = np.random.Generator(np.random.PCG64(0))
    step_seconds: dict[str, list[float]] = {name: [] for name in sides}
    training_seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(math.ceil(options.rounds / TURN)):  # turns: a busy machine slows both sides
        size = (options.warm_up + TURN, lanes, slots)
        actions = draw.uniform(-1, 1, size).astype(np.float32)
        for name, build in sides.items():
            seconds, of_training = time_steps(build(), actions, options.warm_up)
            step_seconds[name] += seconds
            training_seconds[name].append(of_training)
    result: dict[str, Any] = {
        **machine(options.device),
        "what": "HAR MLP on hapt; all visible clients train and send sketches of their updates",
        "keys": options.keys,
        "lanes": lanes,
        "rounds_measured": len(step_seconds["loop"]),
        "target_ratio": TARGET,
    }
    for name in sides:
        step = statistics.median(step_seconds[name])
        training = statistics.median(training_seconds[name])
        result[name] = {
            "steps_per_second": round(lanes / step, 1),
            "milliseconds_per_step": round(1e3 * step / lanes, 2),
            "of_them_training": round(1e3 * training / lanes, 2),
        }
    vector_speed = result["vector"]["steps_per_second"]
    result["ratio"] = round(vector_speed / result["loop"]["steps_per_second"], 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("keys", nargs="*", help="key=value, as for `fedglimpse run`")
    options = parser.parse_args()
    result = measure(options)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    results[options.device] = result
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
