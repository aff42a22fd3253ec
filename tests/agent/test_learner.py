"""The pieces of the learner by hand; `tests/reference` compares whole updates."""

from __future__ import annotations

import torch
from rl_fakes import C, D, N, config

from fedglimpse.agent.config import AgentSizes
from fedglimpse.agent.learner import CLASS_SCORES, AgentLearner, set_value, top_members


def learner(**changes: object) -> AgentLearner:
    return AgentLearner(config(**changes), AgentSizes(D, C, N), [0, 1, 2], torch.device("cpu"))


def test_q_of_a_set_is_the_mean_of_its_clients() -> None:
    q = torch.tensor([[1.0, 2.0, 6.0], [4.0, -1.0, 100.0]])
    chosen = torch.tensor([[True, False, True], [True, True, False]])
    assert set_value(q, chosen).tolist() == [3.5, 1.5]
    per_class = torch.stack([q, 10 * q], dim=-1)
    assert set_value(per_class, chosen).tolist() == [[3.5, 35.0], [1.5, 15.0]]


def test_top_k_never_takes_padding_and_copes_with_fewer_than_k() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 99.0], [1.0, 3.0, 2.0, 4.0], [5.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True] * 4, [True, False, False, False]])
    got = top_members(scores, mask, torch.tensor([2, 3, 5]))
    assert got.tolist() == [
        [False, True, True, False],
        [False, True, True, True],
        [True, False, False, False],
    ]


def test_per_class_q_ranks_clients_by_the_rule() -> None:
    q = torch.tensor([[[9.0, 0.0], [4.0, 4.0], [1.0, 1.0]]])  # [B, V, C]
    assert CLASS_SCORES["mean"](q, dim=2).tolist() == [[4.5, 4.0, 1.0]]
    assert CLASS_SCORES["min"](q, dim=2).tolist() == [[0.0, 4.0, 1.0]]


def test_targets_start_as_copies_that_do_not_share_memory() -> None:
    fresh = learner()
    assert torch.equal(fresh.online.rows, fresh.target.rows)
    fresh.online.rows += 1.0
    assert not torch.equal(fresh.online.rows, fresh.target.rows)
    assert not any(parameter.requires_grad for parameter in fresh.target.parameters())


def test_parameters_are_views_of_one_matrix() -> None:
    fresh = learner()
    fresh.online.rows.zero_()
    assert not any(parameter.any() for parameter in fresh.online.parameters())
    assert fresh.online.rows.shape[1] == sum(p[0].numel() for p in fresh.parameters)


def test_both_ways_to_step_by_adam_agree() -> None:
    """One records into a CUDA graph, the other is the fused kernel of a CPU."""
    plain, fused = (learner(weight_decay=0.1) for _ in range(2))
    assert len(plain._equal_decay) == 2  # identities are spared weight decay
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for step in range(6):
            gradient = torch.randn(plain.online.rows.shape, generator=draw)
            active = torch.tensor([[1.0], [float(step > 2)], [float(step % 2)]])
            plain._adam(gradient.clone(), active)
            fused._fused_adam(gradient.clone(), active)
    for name, tensor in plain.changed.items():
        torch.testing.assert_close(tensor, fused.changed[name], rtol=1e-5, atol=1e-6)
    assert plain.steps.flatten().tolist() == [6.0, 3.0, 3.0]
