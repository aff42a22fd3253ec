"""Learners that several compared methods share: Q-learning over a population or over actions, PPO.

Begin with `population_q.py`. May import what `methods` may.
"""
