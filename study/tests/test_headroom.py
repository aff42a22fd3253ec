"""The study of what a choice can gain: its trials are what a commit would have brought."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fedglimpse.config.loading import resolve

FILE = Path(__file__).parents[1] / "plans" / "headroom.py"
spec = importlib.util.spec_from_file_location("headroom", FILE)
assert spec is not None
assert spec.loader is not None
headroom = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headroom)

SETTINGS = {"data.partition": "label_skew", "rounds": 6, "agent.learn_start": 1, "agent.n_step": 1}


@pytest.mark.parametrize("source", ["raw", "smoothed"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_trial_scores_what_the_round_then_scores(source: str, window: int) -> None:
    config = resolve({**SETTINGS, "aggregate.window": window, "aggregate.source": source})
    study = headroom.Study(config, [0, 1], every=2)
    study.play()
    for r, name in enumerate(study.names):
        if name == "greedy":
            chooser = study.world.lanes[r].method.selector
            assert float(chooser.scores.max()) == pytest.approx(study.score[r][-1], abs=1e-6)
            assert float(chooser.scores.min()) < study.score[r][-1]
    figures = study.figures()
    assert {len(found) for found in figures["accuracy"].values()} == {2}
    assert set(figures["accuracy"]) == set(headroom.CHOOSERS)
    assert "agreement" in figures["probes"]["glimpse"]


def test_a_sum_over_clients_is_additive_and_a_product_is_not() -> None:
    subsets = torch.combinations(torch.arange(8), 4)
    worth = torch.randn(8, generator=torch.Generator().manual_seed(0)).double()
    assert headroom.additive_share(worth[subsets].sum(1), subsets, 8) == pytest.approx(1)
    pairs = ((subsets == 0).any(1) & (subsets == 1).any(1)).double()
    assert headroom.additive_share(pairs, subsets, 8) < 0.9


def test_an_agent_that_knows_the_scores_has_no_regret() -> None:
    subsets = torch.combinations(torch.arange(6), 3)
    worth = torch.arange(6).double()
    scores = worth[subsets].sum(1)
    assert headroom.probe_agent(scores, subsets, worth) == {
        "agreement": pytest.approx(1),
        "regret": 0,
    }
    assert headroom.probe_agent(scores, subsets, -worth)["regret"] == pytest.approx(2)


def test_labels_are_found_in_sketches_only_where_they_are() -> None:
    draw = torch.Generator().manual_seed(0)
    shares = torch.rand(400, 3, generator=draw).softmax(1)
    ids = torch.arange(400) % 40
    told = shares @ torch.randn(3, 20, generator=draw)
    noise = torch.randn(400, 20, generator=draw)
    assert headroom.labels_in_sketches(told - told.mean(0), shares, ids) > 0.8
    assert headroom.labels_in_sketches(noise, shares, ids) < 0.05


def test_choosers_choose_as_they_say() -> None:
    world, names = headroom.world_for(resolve(SETTINGS), [0])
    views = world.views(world.start_round())
    by_name = dict(zip(names, world.lanes, strict=True))
    view = views[names.index("turns")]
    turns = by_name["turns"].method.selector
    first, second = (set(turns.select(view, 5).slots.tolist()) for _ in range(2))
    assert first | second == set(range(10))
    labels = view.reports["label_histogram"]
    pools = {
        n: labels[by_name[n].method.selector.select(view, 5).slots].sum(0)
        for n in ("even", "uneven")
    }
    assert pools["even"].float().std() < pools["uneven"].float().std()
