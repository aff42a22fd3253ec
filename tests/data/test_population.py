import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglimpse.data.config import DataConfig
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import PARTITIONS
from fedglimpse.data.population import (
    Population,
    build_population,
    default_proxy_size,
    split_proxy,
)
from mistakes import mistake


def make_dataset(num_rows=240, classes=4, subjects=6):
    y = torch.arange(num_rows) % classes
    x = torch.arange(num_rows).float()[:, None]
    return Dataset(
        "toy", "Toy", x, y, x[:5], y[:5], classes, torch.arange(num_rows) // 40 % subjects
    )


def build(dataset=None, seed=0, **changes):
    choices = {
        "partition": "dirichlet",
        "clients": 6,
        "alpha": 0.3,
        "classes_per_client": 2,
        "equal_size": True,
        "min_size": 3,
        "proxy": 24,
    }
    if changes.get("partition") == "shards":
        changes = {**changes, "partition": "label_skew", "exact_classes": False}
    return build_population(dataset or make_dataset(), DataConfig(**{**choices, **changes}), seed)


SPLITS = (*PARTITIONS, "shards")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(SPLITS), st.booleans(), st.integers(1, 80), st.integers(0, 10**6))
def test_heldout_proxy_is_never_inside_a_client(partition, equal_size, proxy, seed):
    pop = build(partition=partition, equal_size=equal_size, proxy=proxy, seed=seed)
    held = torch.cat(pop.rows)
    assert len(pop.proxy) == len(pop.proxy.unique()) == proxy
    assert not torch.isin(held, pop.proxy).any()
    assert len(held.unique()) == len(held)
    assert held.max() < len(pop.dataset.x_train)
    assert pop.num_clients == 6
    assert pop.sizes.tolist() == [len(rows) for rows in pop.rows]


@pytest.mark.parametrize("partition", SPLITS)
def test_leaky_proxy_stays_in_the_clients_and_may_repeat(partition):
    pop = build(partition=partition, proxy_source="leaky_train", proxy=200)
    assert pop.sizes.sum() == 240  # nothing was held out
    assert torch.isin(pop.proxy, torch.cat(pop.rows)).all()
    assert len(pop.proxy) == 200 > len(pop.proxy.unique())


@pytest.mark.parametrize("partition", SPLITS)
def test_seed_decides_the_population(partition):
    first, repeated, other = (build(partition=partition, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.rows, repeated.rows, strict=True))
    assert torch.equal(first.proxy, repeated.proxy)
    assert not torch.equal(first.proxy, other.proxy)


def test_partition_options_reach_the_partition():
    equal, unequal = build(), build(equal_size=False)
    assert set(equal.sizes.tolist()) == {36}
    assert unequal.sizes.min() >= 3
    assert unequal.sizes.max() > unequal.sizes.min()
    for classes in (1, 3):
        skew = build(partition="label_skew", classes_per_client=classes)
        held = (skew.label_histogram(torch.arange(6)) > 0).sum(1)
        assert held.tolist() == [classes] * 6


def test_subject_gives_one_client_to_each_person():
    for num_clients in (0, 6):
        pop = build(partition="subject", clients=num_clients)
        assert pop.num_clients == 6
        for rows in pop.rows:
            assert len(pop.dataset.subjects[rows].unique()) == 1


def test_take_pads_to_the_largest_taken_client():
    rows = (torch.tensor([4, 2]), torch.tensor([7]), torch.tensor([1, 5, 9]))
    pop = Population(make_dataset(), rows, torch.tensor([0]))
    table, sizes = pop.take(torch.tensor([1, 0, 1]))
    assert table.tolist() == [[7, 0], [4, 2], [7, 0]]
    assert sizes.tolist() == [1, 2, 1]
    assert pop.take(torch.tensor([2]))[0].tolist() == [[1, 5, 9]]
    table, sizes = pop.take(torch.tensor([], dtype=torch.long))
    assert table.shape == (0, 0)
    assert sizes.shape == (0,)


def test_label_histogram_counts_classes():
    rows = (torch.tensor([0, 4, 1]), torch.tensor([3]))
    pop = Population(make_dataset(), rows, torch.tensor([2]))
    assert pop.label_histogram(torch.tensor([1, 0])).tolist() == [[0, 0, 0, 1], [2, 1, 0, 0]]


def test_default_proxy_size():
    assert [default_proxy_size(n) for n in (50_000, 10_000, 1437, 30)] == [1000, 1000, 143, 3]


@pytest.mark.parametrize("size", [0, 240, 1000])
def test_proxy_that_does_not_fit_is_refused(size):
    with mistake("data.proxy"):
        split_proxy(make_dataset().y_train, size, torch.Generator())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"partition": "subject", "clients": 5}, "data.clients"),
        ({"partition": "iid", "clients": 500}, "data.clients"),
        ({"proxy_source": "leaky_train", "proxy": 0}, "data.proxy"),
    ],
)
def test_mistakes_name_the_setting(changes, key):
    with mistake(key):
        build(**changes)


def test_subject_needs_subjects():
    dataset = dataclasses.replace(make_dataset(), subjects=None)
    with mistake("data.partition"):
        build(dataset, partition="subject", clients=0)
