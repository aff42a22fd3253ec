"""The running agent, with lanes, batches and padding, does what the plain one of one lane does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_agent import PlainAgent, Seen

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
from rl_fakes import outcome, selector, view

from fedglimpse.agent.memory import Sampled
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.types import View

VARIANTS: list[dict[str, Any]] = [
    {},
    {"targets_once": False, "loss": "mse", "optimizer": "sgd", "grad_clip": 0.0},
    {"input": "scalar", "q_output": "per_class", "aux_weight": 0.15, "heads": 2},
    {"q_output": "per_class", "per_class_score": "min", "batch_size": 8, "learn_start": 3},
    {"identity": "none", "advantage_context": False},
    {"identity_decay": True, "normalise_history": False},
    {"temporal_attention": False, "weight_decay": 0.1},
    {"spatial_attention": False, "grad_clip": 0.01},
    {"input": "probed", "reward": "change", "identity": "none", "buffer": 9},
    {"reward": "change", "q_output": "per_class", "n_step": 5},
]
LANES = 3


def seen_by(lane: int, round_num: int) -> View:
    """Ragged sets that differ between lanes."""
    shown = view(100 * lane + round_num, visible=1 + (round_num + lane) % 7, clients=12)
    return View(**{**vars(shown), "round_num": round_num})


def plain_twin(of: GlimpseSelector) -> PlainAgent:
    weights = of.agents.learner.online.lane_weights(of.lane)
    return PlainAgent(of.config, of.agents.sizes, of.agents.seeds[of.lane], weights)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_lanes_equal_plain_agents(changes: dict[str, Any]) -> None:
    selectors = [selector(seed, **changes) for seed in range(LANES)]
    group = GlimpseSelector.group(selectors)
    twins = [plain_twin(one) for one in selectors]
    updates = 0
    for round_num in range(16):
        shown = [seen_by(lane, round_num) for lane in range(LANES)]
        sits_out = [lane == 2 and round_num % 5 == 1 for lane in range(LANES)]  # sees nobody
        views = [None if out else one for out, one in zip(sits_out, shown, strict=True)]
        choices = group.select(views, [3] * LANES)
        for lane, (one, twin) in enumerate(zip(selectors, twins, strict=True)):
            if views[lane] is not None:
                _, scores = twin.look(seen_by(lane, round_num))
                assert one._pending is not None
                torch.testing.assert_close(one._pending[2].scores, scores, rtol=1e-3, atol=1e-4)
        outcomes = [
            None if choice is None else outcome(one, choice.slots)
            for choice, one in zip(choices, shown, strict=True)
        ]
        rounds = [
            None if result is None else peeked(one, result)
            for one, result in zip(selectors, outcomes, strict=True)
        ]
        metrics = group.feedback(outcomes)
        for lane, (twin, item) in enumerate(zip(twins, rounds, strict=True)):
            if item is None:
                assert metrics[lane] == {}
                continue
            twin.rounds.append(item)
            td_loss = twin.learn(round_num)
            assert ("td_loss" in metrics[lane]) == (td_loss is not None)
            if td_loss is not None:
                assert metrics[lane]["td_loss"] == pytest.approx(td_loss, rel=1e-3)
                updates += 1
    assert updates > 15
    for one, twin in zip(selectors, twins, strict=True):
        assert_same_weights(one, twin)


def peeked(one: GlimpseSelector, result: Any) -> Any:
    """Return the round that the selector is about to remember, and leave the selector as it is."""
    before = one._pending, one.step, one.last_reward
    item, _ = one.finish_round(result)
    one._pending, one.step, one.last_reward = before
    return item


def assert_same_weights(one: GlimpseSelector, twin: PlainAgent) -> None:
    for name, plain in (("online", twin.online), ("target", twin.target)):
        running = getattr(one.agents.learner, name).lane_weights(one.lane)
        for key, value in plain.state_dict().items():
            if key == "heads.advantage_output.bias":
                continue  # it cancels in Q: its gradient is rounding, which Adam blows up
            torch.testing.assert_close(running[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("changes", [VARIANTS[0], VARIANTS[2]], ids=str)
def test_one_update_equals_the_plain_one(changes: dict[str, Any]) -> None:
    """Q-values, targets and returns of stored rounds, and the networks after one step."""
    one = selector(**changes)
    twin = plain_twin(one)
    for round_num in range(10):
        shown = seen_by(0, round_num)
        twin.look(shown)
        choice = one.select(shown, 2)
        result = outcome(shown, choice.slots)
        item, _ = one.finish_round(result)
        one.agents.memory.add({0: item})
        twin.rounds.append(item)
    agents = one.agents
    entries = torch.tensor([[0, 2, 5, 7]])
    sketches = twin.standardised(agents.memory.rows["sketch"][0])[None]
    sampled = Sampled(torch.zeros(1, 1, dtype=torch.int64), entries, torch.tensor([[0]]), sketches)
    batch = agents.memory.gather(sampled, width=9)
    later = sampled._replace(entries=entries + one.config.n_step)
    (k,) = agents.memory.rows_of(later.lanes, later.entries, "k")
    future = agents.learner.future(agents.memory.observe(later, width=9), k)
    targets = batch.returns + one.config.gamma**one.config.n_step * future
    q = agents.learner.online(batch.obs)[0][0].detach()
    plain_targets = {entry: twin.target_of(entry) for entry in entries[0].tolist()}
    for row, entry in enumerate(entries[0].tolist()):
        seen = twin.remembered(entry)
        assert isinstance(seen, Seen)
        expected = twin.online(seen).detach()
        count = len(seen.ids)
        torch.testing.assert_close(q[row, :count].view(count, -1), expected, rtol=1e-4, atol=1e-5)
        y = targets[0, row].reshape(-1)
        torch.testing.assert_close(y, plain_targets[entry], rtol=1e-4, atol=1e-5)
    loss = agents.learner.update(batch, future, torch.full((1, 4), 0.25), torch.ones(1, 1))
    assert loss.item() == pytest.approx(twin.step(entries[0].tolist(), plain_targets), rel=1e-4)
    assert_same_weights(one, twin)
