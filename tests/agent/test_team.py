"""Agents in a team do what each would do alone, and what the readable agent does."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rl_fakes import C, D, outcome, selector, view

from fedglimpse.agent.agent import Agent
from fedglimpse.agent.config import AgentConfig
from fedglimpse.agent.copies import copied
from fedglimpse.agent.explore import pick
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.stack import StackedLearner
from fedglimpse.agent.stacked_q import arrange, histogram, q_values
from fedglimpse.methods.glimpse import GlimpseSelector, GlimpseTeam
from fedglimpse.types import View

VARIANTS: list[dict[str, Any]] = [
    {},
    {"targets_once": False, "loss": "mse", "optimizer": "sgd", "grad_clip": 0.0},
    {"input": "scalar", "q_output": "per_class", "aux_weight": 0.15},
    {"q_output": "per_class", "per_class_score": "min", "batch_size": 8, "learn_start": 3},
    {"identity": "none", "advantage_context": False},
    {"identity_decay": True, "normalise_history": False},
    {"temporal_attention": False, "weight_decay": 0.1},
    {"spatial_attention": False, "grad_clip": 0.01},
    {"input": "probed", "reward": "change", "identity": "none"},
    {"reward": "change", "q_output": "per_class"},
]


def seen_by(lane: int, round_num: int) -> View:
    """Ragged sets that differ between lanes; ids grow until the table has to."""
    shown = view(100 * lane + round_num, visible=1 + (round_num + lane) % 7, clients=12)
    ids = shown.ids + (150 if lane == 1 and round_num > 9 else 0)
    return View(**{**vars(shown), "round_num": round_num, "ids": ids})


def realistic(seed: int, **changes: Any) -> GlimpseSelector:
    """An agent of the default size, which learns early."""
    config = AgentConfig(**{"learn_start": 30, **changes})
    return GlimpseSelector(config, sketch_dim=128, num_classes=C, seed=seed)


class Readable:
    """A selector whose agent looks and learns by `Agent.look` and `Agent.learn`."""

    def __init__(self, one: GlimpseSelector) -> None:
        self.one = one
        self.agent: Agent = one.agent

    def play(self, shown: View, k: int) -> tuple[torch.Tensor, float | None]:
        glance, rule = self.agent.look(shown), self.one.config
        scores, k, eps, draw = self.one.ask(shown, k, glance)
        picked = pick(scores, k, eps, rule.exploration, rule.partial_random, draw)
        choice = self.one.choose(shown, k, glance, picked)
        self.one.remember(outcome(shown, choice.slots))
        td_loss = self.agent.learn(shown.round_num).td_loss
        return choice.slots, td_loss


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_team_equals_readable_agents(changes: dict[str, Any]) -> None:
    team = GlimpseTeam([selector(seed, **changes) for seed in range(3)])
    alone = [Readable(selector(seed, **changes)) for seed in range(3)]
    learnt = 0
    for round_num in range(16):
        shown = [seen_by(lane, round_num) for lane in range(3)]
        idle = [lane == 2 and round_num % 5 == 1 for lane in range(3)]  # sees nobody
        views = [None if out else one for out, one in zip(idle, shown, strict=True)]
        choices = team.select(views, [3] * 3)
        outcomes = [
            None if c is None else outcome(s, c.slots) for c, s in zip(choices, shown, strict=True)
        ]
        said = team.feedback(outcomes)
        for lane, choice in enumerate(choices):
            if choice is None:
                assert said[lane] == {}
                continue
            slots, loss = alone[lane].play(seen_by(lane, round_num), 3)
            assert choice.slots.tolist() == slots.tolist()
            assert ("td_loss" in said[lane]) == (loss is not None)
            if loss is not None:
                assert said[lane]["td_loss"] == pytest.approx(loss, rel=1e-3)
                learnt += 1
    assert learnt > 20
    for one, twin in zip(team.selectors, alone, strict=True):
        for name in ("online", "target"):
            here = getattr(one.agent.learner, name).state_dict()
            there = getattr(twin.agent.learner, name).state_dict()
            for key, value in there.items():
                if key == "heads.advantage_output.bias":
                    continue  # it cancels in Q: its gradient is rounding, which Adam blows up
                rows = len(value)  # a team gives all its identity tables the same length
                torch.testing.assert_close(here[key][:rows], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"q_output": "per_class"}, {"d_token": 128}], ids=str)
def test_company_changes_no_bit(changes: dict[str, Any]) -> None:
    """A cell of a sweep must not depend on who shares its pack, on one thread."""
    few, ten, any_number = lambda n: 1 + n % 3, lambda n: 10, lambda n: 1 + (n * 7 + 3) % 23
    sizes = [few, ten, any_number, few, ten]

    def played(company: list[int]) -> dict[int, Any]:
        team = GlimpseTeam([realistic(lane, **changes) for lane in company])
        said: dict[int, Any] = {lane: [] for lane in company}
        for round_num in range(44):
            shown = [
                view(100 * lane + round_num, sizes[lane](round_num), clients=40, dim=128)
                for lane in company
            ]
            shown = [View(**{**vars(one), "round_num": round_num}) for one in shown]
            chosen = team.select(shown, [3] * len(company))
            pairs = zip(shown, chosen, strict=True)
            heard = team.feedback([outcome(one, c.slots) for one, c in pairs if c])
            for lane, choice, back in zip(company, chosen, heard, strict=True):
                assert choice is not None
                said[lane].append((choice.slots.tolist(), back.get("td_loss")))
        for lane, one in zip(company, team.selectors, strict=True):
            net = one.agent.net.state_dict()
            said[lane].append({name: value[:40].tolist() for name, value in net.items()})
        return said

    alone = {lane: played([lane])[lane] for lane in range(5)}
    assert alone[1][-2][1] is not None  # it did learn
    assert played([0, 1, 2, 3, 4]) == alone
    assert played([3, 0]) == {lane: alone[lane] for lane in (3, 0)}


def test_what_a_team_learnt_is_its_agents_own() -> None:
    together = [selector(seed) for seed in range(2)]
    team = GlimpseTeam(together)

    def rounds(numbers: range) -> None:
        for round_num in numbers:
            shown = [seen_by(0, round_num), seen_by(2, round_num)]
            choices = team.select(shown, [2, 2])
            team.feedback([outcome(s, c.slots) for s, c in zip(shown, choices, strict=True) if c])

    rounds(range(12))
    saved = [one.state_dict() for one in together]
    rounds(range(12, 18))
    again = [selector(seed) for seed in range(2)]
    for one, state in zip(again, saved, strict=True):
        one.load_state_dict(state)
    team = GlimpseTeam(again)
    rounds(range(12, 18))
    for one, other in zip(together, again, strict=True):
        for a, b in zip(one.agent.net.parameters(), other.agent.net.parameters(), strict=True):
            assert torch.equal(a, b)
        mine, theirs = (s.agent.learner.optimizer.state_dict()["state"] for s in (one, other))
        assert all(torch.equal(mine[i]["exp_avg"], theirs[i]["exp_avg"]) for i in mine)
        assert float(mine[0]["step"]) == float(theirs[0]["step"]) > 0


def test_a_saved_agent_takes_no_neighbour_along() -> None:
    alone, *together = (selector(seed) for seed in (0, 0, 1, 2))
    team = GlimpseTeam(together)
    for round_num in range(12):
        shown = [view(round_num) for _ in together]
        choices = team.select(shown, [2] * 3)
        team.feedback([outcome(s, c.slots) for s, c in zip(shown, choices, strict=True) if c])
        first = alone.select(view(round_num), 2)
        alone.feedback(outcome(view(round_num), first.slots))
    sizes = []
    for one in (alone, together[0]):
        saved = io.BytesIO()
        torch.save(one.state_dict(), saved)
        sizes.append(saved.tell())
    assert sizes[0] == sizes[1]


def test_copies_are_what_was_copied() -> None:
    rows = torch.arange(12.0).view(3, 4)
    tree = {"a": [rows[1, :2], 5, {"b": rows[:, 3]}], "n": torch.tensor([7]), "s": rows[0, 0]}
    found = copied(tree)
    rows.zero_()
    assert found["a"][0].tolist() == [4.0, 5.0]
    assert found["a"][1] == 5
    assert found["a"][2]["b"].tolist() == [3.0, 7.0, 11.0]
    assert found["n"].dtype == torch.int64
    assert found["s"].shape == ()
    assert copied({"nothing": 1}) == {"nothing": 1}


def test_padding_changes_no_q_in_a_stack() -> None:
    nets = [selector(seed, aux_weight=0.1).agent.net for seed in range(2)]
    names = [name for name, _ in nets[0].named_parameters()]
    p = {n: torch.stack([dict(net.named_parameters())[n] for net in nets]) for n in names}
    draw = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    obs = Observation(
        torch.randn(2, 4, 5, D, generator=draw),
        torch.randint(0, 30, (2, 4, 5), generator=draw),
        mask,
        torch.randn(2, 4, 4, D, generator=draw),
        torch.ones(2, 4, 4, dtype=torch.bool),
    )
    wide = obs._replace(
        clients=torch.cat([obs.clients, torch.full((2, 4, 3, D), 9.0)], dim=2),
        ids=torch.nn.functional.pad(obs.ids, (0, 3)),
        mask=torch.nn.functional.pad(mask, (0, 3)),
    )
    heads = nets[0].mixer.heads  # type: ignore[union-attr]
    narrow_q, _ = q_values(nets[0], p, arrange(obs, heads, full=True))
    wide_q, _ = q_values(nets[0], p, arrange(wide, heads, full=False))
    torch.testing.assert_close(wide_q[:, :, :5], narrow_q, rtol=1e-5, atol=1e-6)
    shares = histogram(nets[0], p, arrange(obs, heads, full=True))
    expected = [net.histogram(Observation(*(v[r] for v in obs))) for r, net in enumerate(nets)]
    torch.testing.assert_close(shares, torch.stack(expected))


def test_both_ways_to_step_by_adam_agree() -> None:
    """One records into a CUDA graph, the other is the fused kernel of a CPU."""
    plain, fused = (
        StackedLearner([selector(seed, weight_decay=0.1).agent.learner for seed in range(3)])
        for _ in range(2)
    )
    assert len(plain._evenly) == 2  # identities are spared weight decay
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for step in range(6):
            gradient = torch.randn(plain.online.rows.shape, generator=draw)
            active = torch.tensor([[1.0], [float(step > 2)], [float(step % 2)]])
            plain._adam(gradient.clone(), active)
            fused._fused_adam(gradient.clone(), active)
    for mine, other in zip(plain.changed, fused.changed, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert plain.steps.flatten().tolist() == [6.0, 3.0, 3.0]
