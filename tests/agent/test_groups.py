"""Selectors that share their agents: saved and resumed, joined and parted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from rl_fakes import outcome, play, selector, view

from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.types import View


def seen_by(lane: int, round_num: int) -> View:
    """Ragged sets that differ between lanes."""
    shown = view(100 * lane + round_num, visible=1 + (round_num + lane) % 7, clients=12)
    return View(**{**vars(shown), "round_num": round_num})


def run(selectors: Sequence[GlimpseSelector], lanes: Sequence[int], rounds: range) -> list[Any]:
    """Run rounds of some lanes in one group; returns everything they log."""
    group = GlimpseSelector.group(selectors)
    log: list[Any] = []
    for round_num in rounds:
        views = [seen_by(lane, round_num) for lane in lanes]
        choices = group.select(views, [2] * len(lanes))
        outcomes = [
            outcome(shown, choice.slots) if choice else None
            for shown, choice in zip(views, choices, strict=True)
        ]
        metrics = group.feedback(outcomes)
        log.append([(c.slots.tolist(), m) for c, m in zip(choices, metrics, strict=True) if c])
    return log


def rows_of(one: GlimpseSelector) -> dict[str, torch.Tensor]:
    return one.agents.learner.state_dict(one.lane)


def test_resuming_with_the_same_company_changes_no_bit() -> None:
    together = [selector(seed) for seed in range(3)]
    run(together, [0, 1, 2], range(12))
    saved = [one.state_dict() for one in together]
    again = [selector(seed) for seed in range(3)]
    for one, state in zip(again, saved, strict=True):
        one.load_state_dict(state)
    log = run(together, [0, 1, 2], range(12, 18))
    assert run(again, [0, 1, 2], range(12, 18)) == log
    for one, other in zip(together, again, strict=True):
        mine, theirs = rows_of(one), rows_of(other)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert mine["steps"].item() > 0


def test_a_lane_leaves_and_another_joins() -> None:
    """What a lane has learnt goes with it, up to rounding."""
    together = [selector(seed) for seed in range(3)]
    alone = [selector(seed) for seed in range(3)]
    run(together, [0, 1, 2], range(12))
    run([together[0], together[2]], [0, 2], range(12, 15))
    run([together[2]], [2], range(15, 18))
    for lane, rounds in ((0, 15), (1, 12), (2, 18)):
        run([alone[lane]], [lane], range(rounds))
    for one, other in zip(together, alone, strict=True):
        mine, theirs = rows_of(one), rows_of(other)
        assert mine["steps"].item() == theirs["steps"].item() > 0
        torch.testing.assert_close(mine["target"], theirs["target"], rtol=1e-3, atol=1e-4)


def test_selectors_that_share_their_agents_go_on_sharing_them() -> None:
    pair = [selector(seed) for seed in range(2)]
    GlimpseSelector.group(pair)
    agents = pair[0].agents
    GlimpseSelector.group(pair)
    assert pair[0].agents is pair[1].agents is agents
    pair[1].select(view(0), 2)  # one of them by itself


def test_group_keys_differ_where_networks_do() -> None:
    first = selector(0)
    assert first.group_key == selector(1).group_key
    assert first.group_key != selector(0, heads=2).group_key
    sizes = {"sketch_dim": 6, "num_classes": 3, "seed": 0}
    for identity, same in (("table", False), ("none", True)):
        config = selector(0, identity=identity).config
        keys = {GlimpseSelector(config, **sizes, num_clients=n).group_key for n in (12, 20)}
        assert (len(keys) == 1) is same


def test_a_saved_selector_takes_no_neighbour_along() -> None:
    alone = selector(0)
    together = [selector(seed) for seed in range(3)]
    run([alone], [0], range(12))
    run(together, [0, 1, 2], range(12))
    sizes = []
    for one in (alone, together[0]):
        saved = io.BytesIO()
        torch.save(one.state_dict(), saved)
        sizes.append(saved.tell())
    assert sizes[0] == sizes[1]


def test_a_group_of_one_is_the_selector_by_itself() -> None:
    one, other = selector(4), selector(4)
    log = play(one, range(14))
    GlimpseSelector.group([other])
    assert play(other, range(14)) == log
