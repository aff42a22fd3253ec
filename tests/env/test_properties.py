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
few = settings(max_examples=12, deadline=None)


def actions(env: ClientSelection, seed: int) -> list[np.ndarray]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(3)]


def same(one: Any, other: Any) -> bool:
    """True where two trees of arrays and plain values agree to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


def played(env: ClientSelection, moves: list[np.ndarray]) -> list[Any]:
    return [env.step(move) for move in moves]


@few
@given(seed=seeds, noise=seeds, subset=st.booleans())
def test_actions_for_invisible_slots_never_matter(seed: int, noise: int, subset: bool) -> None:
    env = shared("subset" if subset else "scores")
    moves, others = actions(env, seed), actions(env, noise)

    def episode(disturbed: bool) -> list[Any]:
        seen, _ = env.reset(seed=seed)
        answers = []
        for move, other in zip(moves, others, strict=True):
            hidden = seen["mask"] == 0
            answers.append(env.step(np.where(hidden & disturbed, other, move)))
            seen = answers[-1][0]
        return answers

    assert same(episode(False), episode(True))


@few
@given(seed=seeds, between=seeds)
def test_episodes_follow_from_the_seed(seed: int, between: int) -> None:
    env = shared()
    moves = actions(env, seed)
    first = env.reset(seed=seed), played(env, moves)
    env.reset(seed=between)
    played(env, moves[:1])
    assert same(first, (env.reset(seed=seed), played(env, moves)))


@settings(max_examples=6, deadline=None)
@given(seed=seeds, before=st.integers(0, 2))
def test_copies_go_on_by_themselves(seed: int, before: int) -> None:
    env = shared()
    moves = actions(env, seed)
    env.reset(seed=seed)
    played(env, moves[:before])
    copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    rest = played(env, moves[before:])
    following = env.reset()
    for other in copies:
        assert same(played(other, moves[before:]), rest)
        assert same(other.reset(), following)


def test_an_environment_can_be_copied_before_its_first_episode() -> None:
    env = ClientSelection(RAGGED)
    other = pickle.loads(pickle.dumps(env))
    assert same(env.reset(), other.reset())


@few
@given(seed=seeds)
def test_the_chosen_are_visible_distinct_and_k(seed: int) -> None:
    env = shared("subset")
    env.reset(seed=seed)
    for *_, info in played(env, actions(env, seed)):
        record = info["record"]
        chosen = record["selected"]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(record["visible"])
        assert len(chosen) == (2 if len(record["visible"]) >= 2 else 0)
