"""The whole selector: contract, learning machinery, saving, policies."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_fakes import SMALL, C, D, N, config, outcome, play, selector, view

from fedglimpse.agent.config import PRESETS, AgentConfig
from fedglimpse.agent.inputs import standardised
from fedglimpse.errors import UserError
from fedglimpse.methods.glimpse import GlimpseSelector
from mistakes import mistake

STORED = Path(__file__).parent / "stored"
CHANGED = ("input", "q_output", "aux_weight", "heads", "identity", "reward")
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
    learner = agent.agents.learner
    before = [parameter.detach().clone() for parameter in learner.parameters]
    said = play(agent, range(24), k=3, ragged=True)
    for round_num, (slots, info, metrics) in enumerate(said):
        visible = 1 + round_num % 7
        assert len(slots) == len(set(slots)) == min(3, visible)
        assert max(slots) < visible
        assert len(info["q"]) == visible
        assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    assert "td_loss" not in said[0][2]
    assert "td_loss" in said[-1][2]
    pairs = zip(before, learner.parameters, strict=True)
    moved = sum(not torch.equal(old, new) for old, new in pairs)
    assert moved >= len(before) - 2


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
    history = agent.agents.history
    shown = standardised(history.sketches, *agent.agents.scale.numbers())[history.exists]
    assert len(shown) == 3
    assert shown.std(dim=0).min() > 0.1


@pytest.mark.parametrize(
    "changes", [VARIANTS[0], VARIANTS[2], VARIANTS[7], *VARIANTS[-2:]], ids=str
)
def test_saved_and_reloaded_agent_acts_and_learns_identically(changes: dict[str, Any]) -> None:
    first = selector(**changes)
    play(first, range(20), ragged=True)
    second = selector(seed=0, **changes)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert play(second, range(20, 30), ragged=True) == play(first, range(20, 30), ragged=True)
    assert torch.equal(*(agent.agents.learner.target.rows for agent in (first, second)))


def test_same_seed_same_run_and_no_global_randomness() -> None:
    torch.manual_seed(1)
    first = play(selector(), range(15))
    torch.manual_seed(2)
    assert play(selector(), range(15)) == first
    assert play(selector(seed=1), range(15)) != first


@pytest.mark.parametrize(
    ("step", "value"), [(0, 1.0), (1, 0.995), (100, 0.5), (179, 0.105), (180, 0.1), (999, 0.1)]
)
def test_epsilon_schedule(step: int, value: float) -> None:
    agent = selector(epsilon_decay=0.005, epsilon_min=0.1)
    agent.step = step
    assert agent.epsilon == pytest.approx(value)


def test_frozen_agents_are_greedy_and_do_not_change() -> None:
    agent = selector(frozen=True)
    before = agent.agents.learner.online.rows.clone()
    said = play(agent, range(15))
    assert {info["behaviour"] for _, info, _ in said} == {"greedy"}
    assert all(slots == top_two(info["q"]) for slots, info, _ in said)
    assert torch.equal(before, agent.agents.learner.online.rows)


def top_two(q: list[float]) -> list[int]:
    return sorted(range(len(q)), key=lambda slot: -q[slot])[:2]


def identities(agent: GlimpseSelector) -> torch.Tensor:
    """The identity table of the online network `[N, d_emb]`."""
    return agent.agents.learner.online.lane_weights(agent.lane)["identity.weight"]


def of_federation(num_clients: int, seed: int = 0) -> GlimpseSelector:
    sizes = {"sketch_dim": D, "num_classes": C, "num_clients": num_clients}
    return GlimpseSelector(config(), **sizes, seed=seed)


def test_unseen_identities_are_not_touched_by_weight_decay() -> None:
    spared, decayed = selector(), selector(identity_decay=True)
    for agent, same in ((spared, True), (decayed, False)):
        before = identities(agent)[30].clone()
        play(agent, range(12))
        assert torch.equal(identities(agent)[30], before) is same


def test_a_client_whose_update_was_lost_does_not_count_as_chosen() -> None:
    agent, seen = selector(), view(0)
    choice = agent.select(seen, 3)
    agent.feedback(outcome(seen, choice.slots[:1]))
    chosen = agent.agents.memory.rows["chosen"][0, 0]
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


@pytest.mark.parametrize("clients", [12, 25, 60])
def test_a_policy_warm_starts_a_federation_of_another_size(clients: int) -> None:
    trained = of_federation(25)
    play(trained, range(20))
    policy = through_a_file(trained.policy())
    other = of_federation(clients, seed=9)
    fresh, taken = identities(other), identities(trained)
    other.load_policy(policy, frozen=True)
    both = min(clients, 25)
    assert torch.equal(identities(other)[:both], taken[:both])
    assert torch.equal(identities(other)[both:], fresh[both:])
    assert torch.equal(other.agents.learner.target.rows, other.agents.learner.online.rows)
    assert other.epsilon == 0.0
    unbiased = of_federation(25)
    unbiased.load_policy(policy, frozen=True)
    assert unbiased.select(view(50), 2).info["q"] == other.select(view(50), 2).info["q"]


@pytest.mark.parametrize("name", ["table", "released", "tuned"])
def test_policies_of_earlier_versions_give_the_same_q(name: str) -> None:
    """`stored/` holds policies and Q-values of five rounds, both of the code before lanes."""
    stored = torch.load(STORED / f"policy_{name}.pt", weights_only=True)
    settings = {k: v for k, v in stored["policy"]["agent"].items() if k in SMALL or k in CHANGED}
    agent = selector(seed=9, **settings)
    agent.load_policy(stored["policy"], frozen=True)
    for i in range(5):
        seen = view(40 + i)
        choice = agent.select(seen, 2)
        assert agent._pending is not None
        torch.testing.assert_close(agent._pending[2].scores, stored["q"][i])
        agent.feedback(outcome(seen, choice.slots))


def test_a_policy_with_a_retired_architecture_is_refused() -> None:
    policy = selector().policy()
    policy["agent"]["encoder"] = "mlp"
    with mistake("agent.encoder"):
        selector().load_policy(policy)


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
            GlimpseSelector(settings, **sizes, num_clients=N, seed=0).load_policy(policy)


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
