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

LANES = 8  # federations side by side
ROUNDS = 40
CONFIG = {
    "data.name": "digits",
    "data.partition": "label_skew",  # every client has two classes
    "method": "fedavg",  # its aggregation; the choice is PPO's
    "selection.k": 2,  # of 10 visible clients: the choice matters most where few are taken
    "sketch.size": 16,  # of the global model; clients send none
    "agent.history": 1,
    "rounds": ROUNDS,
    "evaluate.every": ROUNDS,  # the test set is used in the last round only
}
TEST_SEED = 1_000_000  # initial models that training has not seen


def lanes() -> LanesForSB3:
    """Episodes differ in the initial model; clients and visibility stay the same."""
    return LanesForSB3(LANES, config=CONFIG, reports=("reward",), vary=("model",))


class Curve(BaseCallback):
    """Stores the mean reward of a round over all episodes that end in one rollout of PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[dict[str, float]] = []
        self.sums = np.zeros(LANES)  # rewards of the episodes under way
        self.ended: list[float] = []  # mean rewards of those that ended in this rollout

    def _on_step(self) -> bool:
        self.sums += self.locals["rewards"]
        for lane in np.flatnonzero(self.locals["dones"]):
            self.ended.append(self.sums[lane] / ROUNDS)
            self.sums[lane] = 0
        return True

    def _on_rollout_end(self) -> None:
        mean_reward = float(np.mean(self.ended))
        self.points.append({"steps": self.num_timesteps, "reward": mean_reward})
        self.ended = []


def score(model: PPO | None, episodes: int = 16) -> dict[str, float]:
    """Run whole episodes with new seeds; without a model, choose clients at random."""
    env = lanes()
    rewards = []
    accuracies = []
    for first in range(0, episodes, LANES):
        env.seed(TEST_SEED + first)
        observation = env.reset()
        sums = np.zeros(LANES)
        for _ in range(ROUNDS):
            actions = np.zeros((LANES, *env.action_space.shape))  # equal scores: drawn at random
            if model is not None:
                actions, _ = model.predict(observation, deterministic=False)  # as in training
            observation, reward, _, infos = env.step(actions)
            sums += reward
        rewards += (sums / ROUNDS).tolist()
        accuracies += [info["record"]["accuracy"] for info in infos]
    standard_error = float(np.std(rewards, ddof=1) / len(rewards) ** 0.5)
    return {
        "reward": float(np.mean(rewards)),
        "standard_error": standard_error,
        "final_accuracy": float(np.mean(accuracies)),
        "episodes": episodes,
    }


def main(steps: int = 19_200, episodes: int = 16) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are small
    start = time.perf_counter()
    cpu_start = time.process_time()
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
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),  # on one thread
    }


def table(results: dict[str, Any]) -> str:
    """Return the learning curve and the comparison as Markdown."""
    steps = results["curve"][-1]["steps"]
    lines = [
        f"`python examples/sb3_ppo.py --steps {steps}`, "
        f"{results['cpu_seconds']:.0f} s of one core, {results['seconds']:.0f} s in all, "
        f"standard errors over {results['ppo']['episodes']} episodes:",
        "",
        "| rounds of training | mean reward of a round |",
        "|---|---|",
    ]
    for point in results["curve"]:
        lines.append(f"| {point['steps']:,} | {point['reward']:.3f} |")
    lines += [
        "",
        "| policy | mean reward of a round | accuracy after the last round |",
        "|---|---|---|",
    ]
    for name in ("ppo", "random"):
        policy = results[name]
        reward = f"{policy['reward']:.3f} ± {policy['standard_error']:.3f}"
        lines.append(f"| {name} | {reward} | {100 * policy['final_accuracy']:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=19_200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(main(options.steps), indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
