"""What must hold for all seeds and actions."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import env.gym_parts  # noqa: F401
from env.small_env import RAGGED
from fedglimpse.env import ClientSelection


@cache
def shared(action: str = "scores") -> ClientSelection:
    return ClientSelection(RAGGED, action=action)


seeds = st.integers(0, 2**31 - 1)
few_examples = settings(max_examples=12, deadline=None)


def sampled_actions(env: ClientSelection, seed: int) -> list[np.ndarray]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(3)]


def same(a: Any, b: Any) -> bool:
    """True where two trees of arrays and plain values agree to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))


def steps(env: ClientSelection, actions: list[np.ndarray]) -> list[Any]:
    return [env.step(action) for action in actions]


@few_examples
@given(seed=seeds, noise=seeds, subset=st.booleans())
def test_actions_for_invisible_slots_never_matter(seed: int, noise: int, subset: bool) -> None:
    env = shared("subset" if subset else "scores")
    actions = sampled_actions(env, seed)
    other_actions = sampled_actions(env, noise)

    def episode(disturbed: bool) -> list[Any]:
        observation, _ = env.reset(seed=seed)
        results = []
        for action, other in zip(actions, other_actions, strict=True):
            hidden = observation["mask"] == 0
            results.append(env.step(np.where(hidden & disturbed, other, action)))
            observation = results[-1][0]
        return results

    assert same(episode(False), episode(True))


@few_examples
@given(seed=seeds, between=seeds)
def test_episodes_follow_from_the_seed(seed: int, between: int) -> None:
    env = shared()
    actions = sampled_actions(env, seed)
    first = env.reset(seed=seed), steps(env, actions)
    env.reset(seed=between)
    steps(env, actions[:1])
    assert same(first, (env.reset(seed=seed), steps(env, actions)))


@settings(max_examples=6, deadline=None)
@given(seed=seeds, before=st.integers(0, 2))
def test_copies_continue_independently(seed: int, before: int) -> None:
    env = shared()
    actions = sampled_actions(env, seed)
    env.reset(seed=seed)
    steps(env, actions[:before])
    copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    remaining = steps(env, actions[before:])
    next_episode = env.reset()
    for other in copies:
        assert same(steps(other, actions[before:]), remaining)
        assert same(other.reset(), next_episode)


def test_an_environment_can_be_copied_before_its_first_episode() -> None:
    env = ClientSelection(RAGGED)
    other = pickle.loads(pickle.dumps(env))
    assert same(env.reset(), other.reset())


@few_examples
@given(seed=seeds)
def test_the_chosen_are_visible_distinct_and_k(seed: int) -> None:
    env = shared("subset")
    env.reset(seed=seed)
    for *_, info in steps(env, sampled_actions(env, seed)):
        record = info["record"]
        chosen = record["selected"]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(record["visible"])
        assert len(chosen) == (2 if len(record["visible"]) >= 2 else 0)
