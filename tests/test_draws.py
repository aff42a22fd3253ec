"""What is drawn by weights: the laws, and numbers that no version of a library may change.

The second half needs nothing but torch, NumPy and the package, so that it runs with any version of
them: `PYTHONPATH=src python tests/test_draws.py`. Where one of its numbers has to change,
`version.DRAWS` does, too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data import partition
from fedglimpse.data.config import DataConfig
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.population import build_population
from fedglimpse.federation.visibility import VisibilityConfig, build_visibility
from fedglimpse.methods import oort, power_of_choice
from fedglimpse.methods.base import UniformRandom
from fedglimpse.types import Outcome, Selector, View


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def passes_chi_square(observed: Tensor, expected: Tensor) -> bool:
    from scipy.stats import chi2

    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic < chi2.ppf(0.999, len(expected) - 1)


def test_a_sample_follows_the_law_of_drawing_one_after_the_other() -> None:
    weights = torch.tensor([0.0, 5.0, 1.0, 3.0, 0.5])
    times = 20_000
    counts: dict[tuple[int, ...], int] = {}
    generator = source()
    for _ in range(times):
        drawn = tuple(rng.sample(weights, 2, generator).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    observed: list[float] = []
    expected: list[float] = []
    for first, second in itertools.permutations(range(1, 5), 2):
        left = weights.sum() - weights[first]
        law = weights[first] / weights.sum() * weights[second] / left
        observed.append(counts.pop((first, second), 0))
        expected.append(times * float(law))
    assert not counts  # a weight of zero is never drawn
    assert passes_chi_square(torch.tensor(observed), torch.tensor(expected))


def test_a_sample_has_no_repetition_and_takes_what_there_is() -> None:
    assert sorted(rng.sample(torch.rand(9), 9, source()).tolist()) == list(range(9))
    assert rng.sample(torch.tensor([0, 0, 7, 0, 1]), 2, source()).sort().values.tolist() == [2, 4]
    assert rng.sample(torch.rand(5), 0, source()).tolist() == []


def test_choices_follow_their_weights() -> None:
    weights = torch.tensor([0.0, 2.0, 1e-3, 5.0, 0.0, 1.0, 0.0])
    drawn = rng.choices(weights, 200_000, source(1)).bincount(minlength=7)
    possible = weights > 0
    assert drawn[~possible].sum() == 0
    expected = 200_000 * weights[possible] / weights.sum()
    assert passes_chi_square(drawn[possible], expected)


def test_shares_follow_the_dirichlet_distribution() -> None:
    from scipy.stats import beta, kstest

    for alpha in (0.05, 0.3, 1.0, 7.5, 1000.0):
        shares = rng.dirichlet(alpha, (20_000, 5), source(2))
        assert (shares.sum(1) - 1).abs().max() < 1e-15 * 5
        for column in (0, 4):
            law = beta(alpha, 4 * alpha).cdf
            assert kstest(shares[:, column].numpy(), law).pvalue > 0.001, (alpha, column)
        both = shares[:, 0] + shares[:, 3]
        assert kstest(both.numpy(), beta(2 * alpha, 3 * alpha).cdf).pvalue > 0.001, alpha


def test_extreme_concentrations() -> None:
    for alpha in (5e-324, 1e-300, 1e-8):
        shares = rng.dirichlet(alpha, (200, 4), source())
        assert (shares.max(1).values > 0.99).all()
        assert len(shares.argmax(1).unique()) == 4
    even = rng.dirichlet(1e12, (200, 4), source())
    assert (even - 0.25).abs().max() < 1e-5


def test_numbers_are_those_of_splitmix64() -> None:
    """The first ones for the seed 1234567, as published with other implementations."""
    numbers = rng.Numbers(source())
    numbers._seed = 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [(number % 2**63 >> 10) / 2**53 for number in published]
    assert numbers.take(3).tolist() == expected
    assert numbers.take(2, 4).shape == (2, 4)


def test_the_stream_goes_on() -> None:
    together = rng.Numbers(source()).take(9)
    numbers = rng.Numbers(source())
    assert np.array_equal(np.concatenate([numbers.take(4), numbers.take(5)]), together)
    generator = source()
    first = rng.sample(torch.ones(50), 50, generator)
    assert not torch.equal(first, rng.sample(torch.ones(50), 50, generator))


# From here on: no version of torch or NumPy, and no machine, may give other numbers.

LABELS = torch.tensor([(7 * i * i + i // 31) % 10 for i in range(1200)])
SUBJECTS = torch.tensor([i * i % 23 % 9 for i in range(1200)])


def digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def test_draws_by_weights_are_pinned() -> None:
    weights = torch.arange(1, 13, dtype=torch.float64)
    assert rng.sample(weights, 6, source(3)).tolist() == SAMPLE
    assert rng.choices(weights, 10, source(3)).tolist() == CHOICES
    shares = rng.dirichlet(0.1, (40, 10), source(3))
    assert [share.hex() for share in shares[0, :3].tolist()] == SHARES
    assert digest(shares.tolist()) == ALL_SHARES
    assert digest(rng.dirichlet(5.0, (10, 300), source(3)).tolist()) == MANY_SHARES


def partitions() -> Mapping[str, Callable[[], Any]]:
    """Return what gives each partition: row numbers of the clients."""
    return {
        "dirichlet": lambda: partition.dirichlet_equal(LABELS, 30, 0.1, source()),
        "unequal": lambda: partition.dirichlet_unequal(LABELS, 30, 0.3, 5, source()),
        "label_skew": lambda: partition.exact_classes(LABELS, 30, 2, source()),
        "shards": lambda: partition.random_shards(LABELS, 30, 2, source()),
        "iid": lambda: partition.iid(LABELS, 30, source(), DataConfig()),
        "sample": lambda: partition.stratified_sample(LABELS, 100, source()),
        "drawn dirichlet": lambda: drawn_rows("dirichlet"),
        "drawn label_skew": lambda: drawn_rows("label_skew"),
        "drawn iid": lambda: drawn_rows("iid"),
    }


def drawn_rows(kind: str) -> list[Tensor]:
    x = torch.zeros(len(LABELS), 1)
    dataset = Dataset("made", "made", x, LABELS, x[:10], LABELS[:10], 10, SUBJECTS)
    settings = DataConfig(partition=kind, clients=1000, samples=20, proxy=50)
    return [build_population(dataset, settings, 4).rows[client] for client in range(60)]


def test_partitions_are_pinned() -> None:
    for name, split in partitions().items():
        assert digest([rows.tolist() for rows in split()]) == PARTITIONS[name], name


VISIBILITY = VisibilityConfig(
    cluster_size=7, overlap=2, p=0.2, p_on=0.1, p_off=0.3, present=9, lifetime=15.0
)
KINDS: dict[str, dict[str, Any]] = {
    "mobile": {},
    "cyclic": {},
    "overlapping": {},
    "random": {},
    "markov": {},
    "unequal": {},
    "unequal zipf": {"rates": "zipf", "p_low": 0.001, "p_high": 0.05},
    "unequal label": {"rates_by": "label"},
    "churn": {},
}


def seen(name: str) -> list[list[int]]:
    """Return who is visible in 200 rounds of two runs."""
    settings = {**vars(VISIBILITY), **KINDS[name], "kind": name.partition(" ")[0]}
    pattern = build_visibility(VisibilityConfig(**settings), 40, lambda: LABELS[:40])
    ids: list[list[int]] = []
    for seed in (0, 1):
        for round_num in range(200):
            ids.append(pattern.visible(seed, round_num).tolist())
    return ids


def test_visibility_is_pinned() -> None:
    for name in KINDS:
        assert digest(seen(name)) == VISIBLE[name], name


def chosen(selector: Selector) -> list[list[int]]:
    """Return the choices of 60 rounds; clients report numbers that nobody trained."""
    ids: list[list[int]] = []
    for round_num in range(60):
        visible = torch.arange(round_num % 3, 40, 3)
        loss = ((visible * 37 + round_num * 11) % 101) / 101
        view = View(
            round_num=round_num,
            ids=visible,
            sizes=visible + 5,
            reports={"loss": loss.float()},
            server={},
            rng=rng.generator(5, "select", round_num),
        )
        slots = selector.select(view, 4).slots
        selected = visible[slots]
        ids.append(selected.tolist())
        outcome = Outcome(
            round_num=round_num,
            selected=selected,
            reward=0.5,
            score=0.5,
            per_class=torch.zeros(10),
            reward_per_class=torch.zeros(10),
            weights=torch.full((4,), 0.25),
            reports={"rms_loss": loss[slots].float()},
        )
        selector.feedback(outcome)
    return ids


def selectors() -> Mapping[str, Selector]:
    return {
        "fedavg": UniformRandom(),
        "power-of-choice": power_of_choice.HighestLoss(power_of_choice.Options()),
        "oort": oort.Oort(torch.arange(40) + 5, oort.Options()),
    }


def test_choices_are_pinned() -> None:
    for name, selector in selectors().items():
        assert digest(chosen(selector)) == CHOSEN[name], name


SAMPLE = [10, 9, 4, 5, 3, 11]
CHOICES = [8, 10, 10, 6, 6, 7, 9, 10, 10, 7]
SHARES = ["0x1.9d15d194415fdp-6", "0x1.c547b2e303609p-19", "0x1.bab03d900b563p-17"]
ALL_SHARES = "5f502f6c7997fa5c"
MANY_SHARES = "259f642b9a1c8709"
PARTITIONS: dict[str, str] = {
    "dirichlet": "da0992db7db77174",
    "unequal": "fe5260be8b113ccd",
    "label_skew": "bdf2061388520592",
    "shards": "f24e4125de1262e1",
    "iid": "e304e37012654d19",
    "sample": "35c20a59f023354f",
    "drawn dirichlet": "5d3b38baa36fd63a",
    "drawn label_skew": "c1d3b80a3971b007",
    "drawn iid": "2cbd88e2d498fc1f",
}
VISIBLE: dict[str, str] = {
    "mobile": "54769a5022f5a1bd",
    "cyclic": "282ead52a4857e4b",
    "overlapping": "1035179da4ee82a8",
    "random": "9044f71caf6c8d54",
    "markov": "c247465adfd19e50",
    "unequal": "726b317db5454d03",
    "unequal zipf": "8d295e9a6b6e9810",
    "unequal label": "1ca06b7ca11062db",
    "churn": "e9ea37490ee48a9b",
}
CHOSEN: dict[str, str] = {
    "fedavg": "71dca8c4b58ff89e",
    "power-of-choice": "b8b00223cb38a5b3",
    "oort": "91606cf6dfd9c032",
}

PINNED = (
    test_draws_by_weights_are_pinned,
    test_partitions_are_pinned,
    test_visibility_is_pinned,
    test_choices_are_pinned,
)

if __name__ == "__main__":
    for test in PINNED:
        test()
    print(f"torch {torch.__version__}, NumPy {np.__version__}: all numbers are as pinned")
