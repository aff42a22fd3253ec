"""What can the choice of clients gain at all, and what does the agent see of it?

    python plans/headroom.py data.name=digits data.partition=label_skew --name skewed-digits

Plays federations that differ in who chooses, and in nothing else: the same seeds, partitions,
visible sets, initial models, K, and averaging over time.

    random    K of the visible at random: `fedavg-window`
    even      the K whose pooled labels are most even; reads private labels
    uneven    the K whose pooled labels are least even; reads private labels
    together  the K whose labels, pooled with those of the rounds before that are still in the
              averaging window, are most even; reads private labels
    turns     the K that were chosen least often so far, ties by lot
    greedy    the K whose next global model scores best on the proxy set, found by trying them all
    glimpse   the agent

Every few rounds all subsets of `random` and `glimpse` are tried (none is kept) and measured:

    spread         standard deviation of the next score over subsets
    noise          the part of it that comes from the finite proxy set: scores on two random halves
                   of the set disagree by it
    drift          standard deviation of the score from one round to the next: what a reward shows
                   besides the choice
    additive       share of the variance over subsets that a sum over clients explains
    evenness       rank correlation of a subset's score with how even its labels are
    agreement      rank correlation of a subset's score with the sum of its clients' Q (glimpse)
    regret         how far the score of the agent's best subset lies below the best one, as a share
                   of the distance from the mean subset to the best one (glimpse; 1: like chance)
    labels in sketches   share of the variance of clients' label shares that a linear map of their
                   sketches predicts, for clients it was not fitted on

The figures go to results/headroom/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from fedglimpse.cli.timing import report
from fedglimpse.config.loading import load
from fedglimpse.config.schema import Config
from fedglimpse.federation.aggregation import TemporalWindow
from fedglimpse.methods.base import Stateless
from fedglimpse.methods.oracle_balance import evenness
from fedglimpse.runs.build import WorldSetup, world_of
from fedglimpse.runs.rounds import selectors_of
from fedglimpse.simulation.client_reports import proxy_examples
from fedglimpse.simulation.lane import TrainedClients
from fedglimpse.simulation.world import World
from fedglimpse.theory.rank import spearman
from fedglimpse.types import Choice, View

STORED = Path(__file__).parents[1] / "results" / "headroom"
CHOOSERS = ("random", "even", "uneven", "together", "turns", "greedy", "glimpse")
MOST = 252  # subsets that are tried; all of them for 5 of 10


class Chooser(Stateless):
    """Stands where a selector would be; `greedy` is told the scores of all subsets."""

    needs = frozenset({"delta_sketch", "label_histogram"})

    def __init__(self, name: str, window: int) -> None:
        """Choose as `name` says, with models averaged over `window` rounds."""
        self.name = name
        self.scores = torch.empty(0)  # [B] of `subsets_of` in this round
        self.times: Counter[int] = Counter()  # each client was chosen
        self.pools: deque[Tensor] = deque(maxlen=window - 1)  # [C] labels chosen in past rounds

    def select(self, view: View, k: int) -> Choice:
        """Choose, and remember it."""
        subsets, labels = subsets_of(view, k), view.reports["label_histogram"]
        slots = self._slots(view, subsets, labels, k)
        self.times.update(view.ids[slots].tolist())
        self.pools.append(labels[slots].sum(0))
        return Choice(slots)

    def _slots(self, view: View, subsets: Tensor, labels: Tensor, k: int) -> Tensor:
        by_lot = torch.randperm(view.num_visible, generator=view.rng)
        if self.name == "turns":
            times = torch.tensor([self.times[i] for i in view.ids.tolist()])
            return by_lot[times[by_lot].argsort(stable=True)[:k]]
        if self.name == "greedy":
            return subsets[self.scores.argmax()]
        if self.name == "together":
            before = torch.stack([torch.zeros_like(labels[0]), *self.pools]).sum(0)
            return subsets[evenness(labels + before / k)(subsets).argmax()]
        if self.name in ("even", "uneven"):
            sign = 1 if self.name == "even" else -1
            return subsets[(sign * evenness(labels)(subsets)).argmax()]
        return by_lot[:k]


def subsets_of(view: View, k: int) -> Tensor:
    """Return all subsets of k slots `[B, K]`, or `MOST` of them by chance."""
    every = torch.combinations(torch.arange(view.num_visible), min(k, view.num_visible))
    generator = torch.Generator().manual_seed(view.round_num)
    return every[torch.randperm(len(every), generator=generator)[:MOST].sort().values]


def world_for(config: Config, seeds: Sequence[int]) -> tuple[World, list[str]]:
    """Return a world with a lane for each chooser and seed, and who chooses in each."""
    agent = replace(config, method="glimpse", seeds=tuple(seeds))
    world = world_of(WorldSetup.of(agent), [agent] * len(CHOOSERS))
    names = [name for name in CHOOSERS for _ in seeds]
    for lane, name in zip(world.lanes, names, strict=True):
        if name != "glimpse":
            lane.method = replace(lane.method, selector=Chooser(name, config.aggregate.window))
    return world, names


def tried(world: World, r: int, clients: TrainedClients, subsets: Tensor) -> Tensor:
    """Return the global state that each subset would lead to `[B, d]`."""
    lane, state = world.lanes[r], world.states[r]
    window = lane.method.aggregator
    assert isinstance(window, TemporalWindow)
    sizes = lane.population.sizes[clients.ids].float()
    deltas = clients.states - clients.starts
    members = torch.zeros(len(subsets), len(sizes)).scatter_(1, subsets, 1.0) * sizes
    fresh = state + (members / members.sum(1, keepdim=True)).to(state) @ deltas
    past = [*window.past, *([state] if window.source == "smoothed" else [])]
    past = past[len(past) - (window.window - 1) :] if len(past) >= window.window else past
    return (fresh + sum(past)) / (1 + len(past))


def scores_on(world: World, r: int, states: Tensor, rows: slice) -> Tensor:
    """Return the proxy scores of states `[B]` on some of the proxy rows, in a shuffled order."""
    x, y = proxy_examples(world.lanes[r].population)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[rows].to(y.device)
    x, y = x[order], y[order]
    found = world.evaluator.scores(
        states, x.expand(len(states), *x.shape), y.expand(len(states), -1)
    )
    if world.lanes[r].reward.metric == "f1":
        return torch.tensor([one.macro_f1 for one in found]).double()
    return torch.tensor([one.accuracy for one in found]).double()


def additive_share(scores: Tensor, subsets: Tensor, num: int) -> float:
    """Return the adjusted share of the variance that a sum over clients explains."""
    members = torch.zeros(len(subsets), num).scatter_(1, subsets, 1.0).double()
    design = torch.cat([members[:, 1:], torch.ones(len(subsets), 1)], 1)
    left = scores - design @ torch.linalg.lstsq(design, scores[:, None]).solution[:, 0]
    free = max(len(subsets) - design.shape[1], 1)
    total = scores.var()
    return float(1 - left.square().sum() / free / total) if total > 0 else 0.0


def probe(world: World, r: int, view: View, states: Tensor, subsets: Tensor) -> dict[str, float]:
    """Measure what the choice would change in this round."""
    half = len(world.lanes[r].population.proxy) // 2
    scores = scores_on(world, r, states, slice(None))
    one, other = (scores_on(world, r, states, part) for part in (slice(half), slice(half, None)))
    apart = (one - one.mean()) - (other - other.mean())
    even = evenness(world.lanes[r].population.label_histogram(view.ids))(subsets)
    return {
        "spread": float(scores.std()),
        "noise": float(apart.std()) / 2,
        "best": float(scores.max() - scores.mean()),
        "additive": additive_share(scores, subsets, view.num_visible),
        "evenness": spearman(even.tolist(), scores.tolist()),
    }


def probe_agent(scores: Tensor, subsets: Tensor, q: Tensor) -> dict[str, float]:
    """Measure what the agent's values know of the scores of subsets."""
    worth = q[subsets].sum(1)
    room = float(scores.max() - scores.mean())
    lost = float(scores.max() - scores[worth.argmax()])
    return {
        "agreement": spearman(worth.tolist(), scores.tolist()),
        "regret": lost / room if room > 0 else 1.0,
    }


def labels_in_sketches(sketches: Tensor, shares: Tensor, ids: Tensor) -> float:
    """Return the share of label variance a ridge map predicts, for clients it was not fitted on."""
    sketches, shares = sketches.double(), shares.double()
    left = total = 0.0
    for fold in range(5):
        test = ids % 5 == fold
        x, y = sketches[~test], shares[~test]
        centre = y.mean(0)
        gram = x.T @ x + 0.1 * len(x) * torch.eye(x.shape[1])
        guess = sketches[test] @ torch.linalg.solve(gram, x.T @ (y - centre)) + centre
        left += float((shares[test] - guess).square().sum())
        total += float((shares[test] - centre).square().sum())
    return 1 - left / total


class Study:
    """Plays the lanes and keeps what was measured."""

    def __init__(self, config: Config, seeds: Sequence[int], every: int) -> None:
        """Set up; `every` rounds all subsets are tried."""
        self.world, self.names = world_for(config, seeds)
        self.every, self.rounds = every, config.rounds
        self.selectors = selectors_of(self.world)
        self.accuracy: list[list[float]] = [[] for _ in self.names]
        self.score: list[list[float]] = [[] for _ in self.names]
        self.probes: dict[str, list[dict[str, float]]] = {"random": [], "glimpse": []}
        self.sketches: list[tuple[Tensor, Tensor, Tensor]] = []

    def play(self) -> None:
        """Play all rounds."""
        world = self.world
        for t in range(self.rounds):
            views = world.views(world.start_round())
            trials = {
                r: self.try_all(r, view)
                for r, (name, view) in enumerate(zip(self.names, views, strict=True))
                if view is not None and (name == "greedy" or self.probed(t, name))
            }
            choices = self.selectors.select(views)
            for r, (states, subsets) in trials.items():
                self.measure(r, views[r], states, subsets, choices[r])
            world.aggregate(world.collect(choices))
            late = t >= self.rounds - 50
            results = world.score([late] * len(self.names))
            outcomes = results.outcomes()
            metrics = self.selectors.feedback(outcomes)
            for r, record in enumerate(results.records(metrics)):
                outcome = outcomes[r]
                self.score[r].append(outcome.score if outcome else self.score[r][-1])
                self.accuracy[r] += [record["accuracy"]] if late else []
            if t % 20 == 0:
                print(f"round {t}", file=sys.stderr, flush=True)

    def probed(self, t: int, name: str) -> bool:
        """True where all subsets are measured."""
        return name in self.probes and t % self.every == self.every - 1

    def try_all(self, r: int, view: View) -> tuple[Tensor, Tensor]:
        """Return the states of all subsets and the subsets; tell the greedy chooser."""
        lane = self.world.lanes[r]
        subsets = subsets_of(view, lane.k)
        clients = self.world.rounds[r].candidates
        assert clients is not None  # glimpse and `Chooser` let all visible clients train first
        states = tried(self.world, r, clients, subsets)
        if isinstance(chooser := lane.method.selector, Chooser):
            chooser.scores = scores_on(self.world, r, states, slice(None))
        return states, subsets

    def measure(
        self, r: int, view: View | None, states: Tensor, subsets: Tensor, choice: Choice | None
    ) -> None:
        """Measure a round of a lane in which all subsets were tried."""
        name = self.names[r]
        if view is None or choice is None or name not in self.probes:
            return
        found = probe(self.world, r, view, states, subsets)
        if name == "glimpse":
            scores = scores_on(self.world, r, states, slice(None))
            found |= probe_agent(scores, subsets, torch.tensor(choice.info["q"]))
        else:
            shares = view.reports["label_histogram"].float()
            sketch = view.reports["delta_sketch"]
            sketch = (sketch - sketch.mean(0)) / sketch.std(0).clamp(min=1e-8)
            self.sketches.append((sketch, shares / shares.sum(1, keepdim=True), view.ids))
        self.probes[name].append({"round": float(view.round_num), **found})

    def figures(self) -> dict[str, Any]:
        """Return everything that was found."""
        sketches, shares, ids = (torch.cat(c) for c in zip(*self.sketches, strict=True))
        late = slice(self.rounds // 2, None)
        steps = [
            stdev(_steps(s[late]))
            for s, n in zip(self.score, self.names, strict=True)
            if n == "random"
        ]
        return {
            "accuracy": {
                name: [mean(a) for a, n in zip(self.accuracy, self.names, strict=True) if n == name]
                for name in CHOOSERS
            },
            "drift": mean(steps),
            "labels_in_sketches": labels_in_sketches(sketches, shares, ids),
            "probes": {
                name: {key: mean(p[key] for p in some) for key in some[0] if key != "round"}
                for name, all_of in self.probes.items()
                if (some := [p for p in all_of if p["round"] >= self.rounds // 2])
            },
        }


def _steps(scores: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(scores)]


def main() -> None:
    """Play, print and store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--name", required=True, help="of the stored file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--every", type=int, default=5, help="rounds between two probes")
    words = parser.parse_args()
    config = load(words=["preset=tuned-1", *words.settings, f"rounds={words.rounds}"])
    study = Study(config, range(words.seeds), words.every)
    study.play()
    command = f"python plans/headroom.py {shlex.join(sys.argv[1:])}"
    device = str(study.world.states.device)
    text = json.dumps(report(command, study.figures(), device), indent=1)
    STORED.mkdir(parents=True, exist_ok=True)
    (STORED / f"{words.name}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
