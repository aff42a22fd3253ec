"""Train your own agent in 70 lines: one number for each client, learnt by policy gradient.

Needs: pip install 'fedglimpse[gym]'          Run: python examples/train_an_agent.py
"""

import gymnasium
import numpy as np
import torch

import fedglimpse.env  # registers the environment

ROUNDS = 30
K = 3  # clients chosen in a round
CONFIG = {"data.partition": "label_skew", "rounds": ROUNDS, "selection.k": K}


def choose(
    logits: torch.Tensor, slots: int, draw: np.random.Generator
) -> tuple[np.ndarray, torch.Tensor]:
    """Draw K of the visible clients without replacement, by adding Gumbel noise to their logits.

    Returns an action, one score for each slot, and the log probability of the draw.
    """
    visible = len(logits)
    noisy = logits.detach().numpy() + draw.gumbel(size=visible)
    action = np.zeros(slots, np.float32)
    action[:visible] = np.tanh(noisy / 10)  # only the order counts
    order = np.argsort(-noisy)
    log_prob = torch.zeros(())
    for i in range(min(K, visible)):  # the i-th client, among those not drawn before it
        log_prob = log_prob + logits[order[i]] - logits[order[i:]].logsumexp(0)
    return action, log_prob


def main(episodes: int = 40) -> list[float]:
    """Train, and return the mean reward of every episode."""
    env = gymnasium.make(fedglimpse.env.ID, config=CONFIG, reports=(), vary=("model",))
    slots = env.action_space.shape[0]
    preferences = torch.zeros(env.unwrapped.shape.clients, requires_grad=True)  # [N] learnt
    optimizer = torch.optim.Adam([preferences], lr=0.05)
    draw = np.random.default_rng(0)
    baseline = np.zeros(ROUNDS)  # mean return from each round on
    episode_rewards = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        log_probs = []
        rewards = []
        done = False
        while not done:
            visible = observation["mask"].sum()
            logits = preferences[observation["ids"][:visible]]  # [V]
            action, log_prob = choose(logits, slots, draw)
            observation, reward, terminated, truncated, _ = env.step(action)
            log_probs.append(log_prob)
            rewards.append(reward)
            done = terminated or truncated
        returns = np.array([np.mean(rewards[t : t + 10]) for t in range(len(rewards))])
        advantage = torch.from_numpy(returns - baseline).float()
        baseline += (returns - baseline) / (episode + 1)
        if episode:  # the first episode only sets the baseline
            optimizer.zero_grad()
            (-advantage * torch.stack(log_probs)).sum().backward()
            optimizer.step()
        episode_rewards.append(float(np.mean(rewards)))
    return episode_rewards


if __name__ == "__main__":
    for episode, reward in enumerate(main()):
        print(f"episode {episode:3}   mean reward {reward:.3f}")
