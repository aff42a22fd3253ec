"""The whole selector: contract, learning machinery, saving, policies."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rl_fakes import C, D, config, outcome, play, selector, view

from fedglimpse.agent.config import PRESETS, AgentConfig
from fedglimpse.errors import UserError
from fedglimpse.methods.glimpse import GlimpseSelector
from mistakes import mistake

VARIANTS: list[dict[str, Any]] = [
    {},
    {"input": "abs", "standardise": False, "normalise_history": False},
    {"input": "scalar", "q_output": "per_class", "aux_weight": 0.15, "exploration": "partial"},
    {"q_output": "per_class", "per_class_score": "min"},
    {"identity": "none"},
    {"temporal_attention": False},
    {"spatial_attention": False},
    {"optimizer": "sgd", "loss": "mse", "grad_clip": 0.0},
    {"history": 1, "n_step": 5},
    {"history": 16, "n_step": 1},
    {"input": "probed", "reward": "change"},
    {"reward": "change", "q_output": "per_class"},
]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_variant_runs_on_ragged_sets_and_learns(changes: dict[str, Any]) -> None:
    agent = selector(**changes)
    before = [p.detach().clone() for p in agent.agent.net.parameters()]
    said = play(agent, range(24), k=3, ragged=True)
    for round_num, (slots, info, metrics) in enumerate(said):
        visible = 1 + round_num % 7
        assert len(slots) == len(set(slots)) == min(3, visible)
        assert max(slots) < visible
        assert len(info["q"]) == visible
        assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    assert "td_loss" not in said[0][2]
    assert "td_loss" in said[-1][2]
    after = list(agent.agent.net.parameters())
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert moved >= len(after) - 2


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_ask_for_their_reports(preset: str) -> None:
    needs = AgentConfig(**PRESETS[preset]).needs
    clients = {
        "tuned": {"update_norm", "train_loss", "loss"},
        "tuned-1": {"delta_sketch"},
        "paper": {"sketch"},
        "released": {"update_norm", "train_loss", "proxy_histogram"},
    }
    assert needs == clients[preset] | {"global_sketch", "reward"}


def test_metrics_and_info() -> None:
    _, info, metrics = play(selector(), range(12))[-1]
    assert set(info) == {"behaviour", "epsilon", "q"}
    assert info["behaviour"] in ("greedy", "explore")
    assert set(metrics) == {
        "td_loss", "mean_q", "q_spread", "epsilon", "fraction_greedy", "attention_entropy",
        "server_flops",
    }  # fmt: skip
    assert metrics["epsilon"] == pytest.approx(1 - 0.005 * 11)
    assert metrics["mean_q"] == pytest.approx(sum(info["q"]) / 5, abs=1e-3)
    assert 0 <= metrics["attention_entropy"] <= 1.3863  # at most ln 4


def test_server_flops_count_the_choice_and_every_mini_batch() -> None:
    said = play(selector(), range(12))
    look, learned = said[0][2]["server_flops"], said[-1][2]["server_flops"]
    # 2 mini-batches of 4: three forward costs on what was seen, two on what came next
    assert learned == pytest.approx(look * (1 + 2 * 4 * 5))


def test_one_visible_client() -> None:
    agent = selector(frozen=True)
    assert agent.select(view(0, visible=1), 5).slots.tolist() == [0]


def test_history_is_not_constant_after_three_rounds() -> None:
    agent = selector()
    play(agent, range(3))
    sketches, mask = agent.agent.history.window()
    shown = agent.agent.scale(sketches[mask])
    assert len(shown) == 3
    assert shown.std(dim=0).min() > 0.1
    batch = agent.agent.replay.gather(agent.agent.replay.starts())
    assert batch.next_obs.history[0].std(dim=0).max() > 0.1


@pytest.mark.parametrize(
    "changes", [VARIANTS[0], VARIANTS[2], VARIANTS[7], *VARIANTS[-2:]], ids=str
)
def test_saved_and_reloaded_agent_acts_and_learns_identically(changes: dict[str, Any]) -> None:
    first = selector(**changes)
    play(first, range(20), ragged=True)
    second = selector(seed=0, **changes)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert play(second, range(20, 30), ragged=True) == play(first, range(20, 30), ragged=True)
    weights = [a.agent.learner.target.state_dict() for a in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_same_seed_same_run_and_no_global_randomness() -> None:
    torch.manual_seed(1)
    first = play(selector(), range(15))
    torch.manual_seed(2)
    assert play(selector(), range(15)) == first
    assert play(selector(seed=1), range(15)) != first


def test_frozen_agents_are_greedy_and_do_not_change() -> None:
    agent = selector(frozen=True)
    before = {name: w.clone() for name, w in agent.agent.net.state_dict().items()}
    said = play(agent, range(15))
    assert {info["behaviour"] for _, info, _ in said} == {"greedy"}
    assert all(slots == top_two(info["q"]) for slots, info, _ in said)
    assert all(torch.equal(before[n], w) for n, w in agent.agent.net.state_dict().items())


def top_two(q: list[float]) -> list[int]:
    return sorted(range(len(q)), key=lambda slot: -q[slot])[:2]


def test_new_clients_may_join_at_any_time() -> None:
    agent = selector()
    play(agent, range(12))
    table = agent.agent.net.identity
    rows = len(table.weight)
    seen = view(12)
    seen = replace(seen, ids=torch.tensor([1, 2, 3, 4, 700]))
    choice = agent.select(seen, 2)
    agent.feedback(outcome(seen, choice.slots))
    assert len(table.weight) == 1024 > rows
    assert len(agent.agent.learner.target.identity.weight) == 1024
    moments = agent.agent.learner.optimizer.state[table.weight]["exp_avg"]
    assert moments.shape == table.weight.shape
    play(agent, range(13, 20))
    fresh = selector()
    fresh.load_state_dict(through_a_file(agent.state_dict()))
    assert play(fresh, range(20, 24)) == play(agent, range(20, 24))


def test_unseen_identities_are_not_touched_by_weight_decay() -> None:
    spared, decayed = selector(), selector(identity_decay=True)
    for agent, same in ((spared, True), (decayed, False)):
        before = agent.agent.net.identity.weight[100].detach().clone()
        play(agent, range(12))
        assert torch.equal(agent.agent.net.identity.weight[100], before) is same


def test_a_client_whose_update_was_lost_does_not_count_as_chosen() -> None:
    agent, seen = selector(), view(0)
    choice = agent.select(seen, 3)
    agent.feedback(outcome(seen, choice.slots[:1]))
    chosen = agent.agent.replay.state_dict()["rows"]["chosen"][0]
    assert chosen.nonzero().flatten().tolist() == choice.slots[:1].tolist()


def test_feedback_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="round 0"):
        selector().feedback(outcome(view(0), torch.tensor([0])))


def test_a_missing_histogram_is_no_error() -> None:
    agent = selector(aux_weight=0.5)
    for round_num in range(10):
        seen = view(round_num)
        if round_num % 2:
            seen = replace(seen, server={"global_sketch": seen.server["global_sketch"]})
        metrics = agent.feedback(outcome(seen, agent.select(seen, 2).slots))
    assert metrics["td_loss"] > 0


def test_a_policy_warm_starts_a_run_with_other_clients() -> None:
    trained = selector()
    play(trained, range(20))
    policy = through_a_file(trained.policy())
    known = policy["known_ids"]
    assert known == 12
    other = selector(seed=9)
    own = other.agent.net.identity.weight.detach().clone()
    other.load_policy(policy, frozen=True)
    theirs, ours = trained.agent.net.identity.weight, other.agent.net.identity.weight
    assert torch.equal(ours[:known], theirs[:known])
    assert torch.equal(ours[known:], own[known:])
    assert torch.equal(other.agent.learner.target.identity.weight, ours)
    assert other.epsilon == 0.0
    with torch.no_grad():
        trained.frozen = True
        trained.agent.history, trained.agent.scale = other.agent.history, other.agent.scale
        assert trained.select(view(50), 2).info["q"] == other.select(view(50), 2).info["q"]


def test_a_warm_start_goes_on_learning_and_exploring_where_it_stopped() -> None:
    trained = selector()
    play(trained, range(20))
    other = selector(seed=9)
    other.load_policy(trained.policy())
    assert other.epsilon == pytest.approx(0.9)
    assert "td_loss" in play(other, range(12))[-1][2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_token": 8}, ["agent.d_token=16", "agent.d_token=8"]),
        ({"history": 2}, ["agent.history=3", "agent.history=2"]),
        ({"identity": "none"}, ["agent.identity=table", "agent.identity=none"]),
    ],
)
def test_a_policy_that_does_not_fit_says_why(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        selector(**changes).load_policy(selector().policy())
    assert all(word in str(error.value) for word in words)


def test_a_policy_of_another_sketch_size_or_class_count_is_refused() -> None:
    policy = selector(q_output="per_class").policy()
    settings = config(q_output="per_class")
    for sizes, word in (({"sketch_dim": 7, "num_classes": C}, r"sketch\.size"),
                        ({"sketch_dim": D, "num_classes": 4}, "a Q for each of")):  # fmt: skip
        with pytest.raises(UserError, match=word):
            GlimpseSelector(settings, **sizes, seed=0).load_policy(policy)


def test_a_policy_loads_with_or_without_the_auxiliary_head() -> None:
    for ours, theirs in (({}, {"aux_weight": 0.1}), ({"aux_weight": 0.1}, {})):
        agent = selector(**ours)
        agent.load_policy(selector(seed=3, **theirs).policy())
        play(agent, range(10))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input", "grads"),
        ("heads", 3),
        ("history", 0),
        ("gamma", 1.0),
        ("tau", 0.0),
        ("epsilon_min", 1.5),
        ("lr", 0.0),
        ("weight_decay", -1.0),
        ("buffer", 8),
        ("d_token", 1),
    ],
)
def test_wrong_settings_name_the_key(key: str, value: Any) -> None:
    with mistake(f"agent.{key}"):
        AgentConfig(**{key: value})
