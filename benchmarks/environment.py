"""Steps per second of 16 lanes of one world against 16 environments in a Python loop, HAR MLP.

Run: python benchmarks/environment.py [--device cuda] [--lanes 16] [key=value ...]
Both sides make the calls that `ClientSelection` and `ClientSelectionVector` make, so that
gymnasium need not be there. Writes benchmarks/results/environment.json, one entry for each device.
Steps are timed from outside alone: an environment works its books out while the next clients train,
and a clock inside would make it wait. How much is local training is measured in rounds of its own.
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

from fedglimpse.configure import parse_words
from fedglimpse.env.arrays import Shape, info_of, observations, slots_of
from fedglimpse.env.settings import settings_of
from fedglimpse.env.stepper import LaneStepper

RESULT = Path(__file__).parent / "results" / "environment.json"
TARGET = 8.0  # times as many steps per second
TURN = 10  # steps of one side before those of the other
Medians = dict[str, float]  # side -> seconds of a step


class Lanes:
    """A stepper with the arrays that go in and out of an environment."""

    def __init__(self, config: dict[str, Any], seeds: list[int], data: LaneStepper | None) -> None:
        parts = None if data is None else data.parts
        self.stepper = LaneStepper(settings_of(config), len(seeds), parts)
        self.shape = Shape.of(self.stepper)
        self.stepper.restart(dict(enumerate(seeds)))
        self.stepper.look()

    def step(self, actions: np.ndarray) -> object:
        """Play one round of every lane."""
        stepper = self.stepper
        chosen = [
            slots_of(action, look, stepper.k, subset=False)
            for action, look in zip(actions, stepper.looks, strict=True)
        ]
        steps = stepper.step(chosen)
        return observations(stepper.looks, self.shape), [*map(info_of, stepper.looks, steps)]


class Clock:
    """Counts the seconds of a trainer, which worlds on the same parts share."""

    def __init__(self, trainer: Any) -> None:
        self.seconds = 0.0
        self._train, trainer.train = trainer.train, self._timed

    def _timed(self, *arguments: Any) -> Any:
        began = now()
        answer = self._train(*arguments)
        self.seconds += now() - began
        return answer

    def training(self, sides: list[Lanes], actions: np.ndarray) -> float:
        """Return the seconds of one step of every lane that were local training."""
        self.seconds = 0.0
        play(sides, actions)
        return self.seconds


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


def measure(words: argparse.Namespace) -> dict[str, Any]:
    lanes, warm_up = words.lanes, words.warm_up
    config = {"data.name": "hapt", "method": "fedavg-window", "engine.device": words.device}
    config |= parse_words(words.keys)
    together = Lanes(config, list(range(lanes)), None)
    apart = [Lanes(config, [seed], together.stepper) for seed in range(lanes)]
    sides = {"vector": [together], "loop": apart}
    draw = np.random.Generator(np.random.PCG64(0))

    def in_turns(rounds: int, time_of: Callable[[list[Lanes], np.ndarray], float]) -> Medians:
        """Return the median seconds of a step, each side with the same actions.

        A busy machine is busy for both sides. A turn is several steps long: nobody steps one side
        and then the other, which leaves each with the caches of the other.
        """
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(0, rounds, TURN):
            shape = (min(TURN, rounds - turn), lanes, together.shape.slots)
            actions = draw.uniform(-1, 1, shape).astype(np.float32)
            for name, own in sides.items():
                found[name] += [time_of(own, some) for some in actions]
        return {name: statistics.median(times) for name, times in found.items()}

    in_turns(warm_up, play)
    whole = in_turns(words.rounds, play)
    training = in_turns(warm_up, Clock(together.stepper.world.trainer).training)
    result: dict[str, Any] = {
        **machine(words.device),
        "what": "HAR MLP on hapt; all visible clients train and send sketches of their updates",
        "keys": words.keys,
        "lanes": lanes,
        "rounds_measured": words.rounds,
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
