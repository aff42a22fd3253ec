"""Learners that several compared methods share: Q-learning over clients or actions, PPO.

Begin with `q_selector.py` (FAVOR, FLASH-RL, FedAgent) or `learned_weights.py` (FedDRL, FedPPO);
`double_dqn.py` is the Q-learning that `population_q.py` and `action_q.py` build on. May import what
`methods` may.
"""
