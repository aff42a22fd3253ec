"""Train your own agent in 40 lines: one number for each client, learnt by policy gradient.

Needs: pip install 'fedglimpse[gym]'          Run: python examples/train_an_agent.py
"""

import gymnasium
import numpy as np
import torch

import fedglimpse.env  # registers the environment

ROUNDS, K = 30, 3
CONFIG = {"data.partition": "label_skew", "rounds": ROUNDS, "selection.k": K}


def main(episodes: int = 40) -> list[float]:
    """Return the mean reward of every episode."""
    env = gymnasium.make(fedglimpse.env.ID, config=CONFIG, reports=(), vary=("model",))
    value = torch.zeros(env.unwrapped.shape.clients, requires_grad=True)  # [N] what is learnt
    optimizer, draw = torch.optim.Adam([value], lr=0.05), np.random.default_rng(0)
    usual, means = np.zeros(ROUNDS), []  # the usual return from each round on
    for episode in range(episodes):
        seen, _ = env.reset(seed=episode)
        log_chances, rewards, over = [], [], False
        while not over:
            visible = seen["mask"].sum()
            logits = value[seen["ids"][:visible]]  # [V]
            noisy = logits.detach().numpy() + draw.gumbel(size=visible)  # a draw without return
            action = np.zeros(env.action_space.shape, np.float32)
            action[:visible] = np.tanh(noisy / 10)  # only the order counts
            log_chance, order = torch.zeros(()), np.argsort(-noisy)
            for i in range(min(K, visible)):  # chance of this client among those left
                log_chance = log_chance + logits[order[i]] - logits[order[i:]].logsumexp(0)
            log_chances.append(log_chance)
            seen, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            over = terminated or truncated
        returns = np.array([np.mean(rewards[t : t + 10]) for t in range(len(rewards))])
        better = torch.from_numpy(returns - usual).float()
        usual += (returns - usual) / (episode + 1)
        if episode:  # the first episode only says what is usual
            optimizer.zero_grad()
            (-better * torch.stack(log_chances)).sum().backward()
            optimizer.step()
        means.append(float(np.mean(rewards)))
    return means


if __name__ == "__main__":
    for i, mean in enumerate(main()):
        print(f"episode {i:3}   mean reward {mean:.3f}")
