"""Stable-Baselines3's PPO learns to choose clients on the digits data, 8 federations at once.

Needs: pip install 'fedglimpse[gym]'
Run: python examples/sb3_ppo.py [--steps 19200] [--out ppo.json]      under 3 minutes on 2 cores
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from fedglimpse.env import LanesForSB3

LANES, ROUNDS = 8, 40
CONFIG = {
    "data.name": "digits",
    "data.partition": "label_skew",  # every client has two classes
    "method": "fedavg",  # its aggregation; the choice is PPO's
    "selection.k": 2,  # of 10 visible clients: the choice matters most where few are taken
    "sketch.size": 16,  # of the global model; clients send none
    "agent.history": 1,
    "rounds": ROUNDS,
    "evaluate.every": ROUNDS,  # the test set is looked at in the last round only
}
TEST_SEED = 1_000_000  # initial models that training has not seen


def lanes() -> LanesForSB3:
    """Episodes differ in the initial model; clients and the server's way stay the same."""
    return LanesForSB3(LANES, config=CONFIG, reports=("reward",), vary=("model",))


class Curve(BaseCallback):
    """Keeps the mean reward of a round, of all episodes that end in one rollout of PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[dict[str, float]] = []
        self.sums, self.ended = np.zeros(LANES), []

    def _on_step(self) -> bool:
        self.sums += self.locals["rewards"]
        for r in np.flatnonzero(self.locals["dones"]):
            self.ended.append(self.sums[r] / ROUNDS)
            self.sums[r] = 0
        return True

    def _on_rollout_end(self) -> None:
        point = {"steps": self.num_timesteps, "reward": float(np.mean(self.ended))}
        self.points.append(point)
        self.ended = []


def score(model: PPO | None, episodes: int = 16) -> dict[str, float]:
    """Play whole episodes with new seeds; without a model, at random."""
    env, rewards, accuracies = lanes(), [], []
    for first in range(0, episodes, LANES):
        env.seed(TEST_SEED + first)
        seen, sums = env.reset(), np.zeros(LANES)
        for _ in range(ROUNDS):
            actions = np.zeros((LANES, *env.action_space.shape))  # equal scores: drawn at random
            if model is not None:
                actions, _ = model.predict(seen, deterministic=False)  # as it was trained
            seen, reward, _, infos = env.step(actions)
            sums += reward
        rewards += (sums / ROUNDS).tolist()
        accuracies += [info["record"]["accuracy"] for info in infos]
    deviation = float(np.std(rewards, ddof=1) / len(rewards) ** 0.5)
    return {
        "reward": float(np.mean(rewards)),
        "standard_error": deviation,
        "final_accuracy": float(np.mean(accuracies)),
        "episodes": episodes,
    }


def main(steps: int = 19_200, episodes: int = 16) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are small
    began, cpu = time.perf_counter(), time.process_time()
    curve = Curve()
    model = PPO(
        "MlpPolicy",
        lanes(),
        n_steps=4 * ROUNDS,  # four whole episodes of every lane
        batch_size=160,
        gamma=0.9,
        learning_rate=1e-3,
        policy_kwargs={"log_std_init": -1.0},  # scores mostly within [-1, 1]
        seed=0,
        device="cpu",
    )
    model.learn(steps, callback=curve)
    return {
        "curve": curve.points,
        "ppo": score(model, episodes),
        "random": score(None, episodes),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),  # on one thread
    }


def table(found: dict[str, Any]) -> str:
    """Return the learning curve and the comparison as Markdown."""
    lines = ["| rounds played in training | mean reward of a round |", "|---|---|"]
    lines += [f"| {point['steps']:,} | {point['reward']:.3f} |" for point in found["curve"]]
    lines += [
        "",
        "| policy | mean reward of a round | accuracy after the last round |",
        "|---|---|---|",
    ]
    for name in ("ppo", "random"):
        one = found[name]
        reward = f"{one['reward']:.3f} ± {one['standard_error']:.3f}"
        lines.append(f"| {name} | {reward} | {100 * one['final_accuracy']:.1f} % |")
    command = f"`python examples/sb3_ppo.py --steps {found['curve'][-1]['steps']}`"
    spent = f"{found['cpu_seconds']:.0f} s of one core, {found['seconds']:.0f} s in all"
    note = f"standard errors over {found['ppo']['episodes']} episodes"
    return "\n".join([f"{command}, {spent}, {note}:", "", *lines])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=19_200)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    found = main(words.steps)
    text = json.dumps(found, indent=2)
    if words.out:
        words.out.write_text(text + "\n")
    print(text)
