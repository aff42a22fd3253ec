import hashlib

import pytest
import torch
from test_population import build, make_dataset

from fedglimpse.config.schema import Config, DataConfig
from fedglimpse.data.partition import PARTITIONS
from fedglimpse.data.population import VirtualRows
from fedglimpse.runs.build import population_of
from mistakes import mistake

MANY = 1_000_000
DRAWN = [name for name, functions in PARTITIONS.items() if functions.mix]


@pytest.mark.parametrize("partition", DRAWN)
def test_a_client_is_the_same_whenever_it_is_asked(partition):
    first, repeated = (build(partition=partition, clients=MANY, samples=12) for _ in range(2))
    _ = first.rows[7], first.rows[MANY - 1]  # what was asked before does not matter
    for client in (MANY - 1, 0, 123_456):
        assert torch.equal(first.rows[client], first.rows[client])
        assert torch.equal(first.rows[client], repeated.rows[client])


@pytest.mark.parametrize("partition", DRAWN)
def test_clients_and_seeds_differ(partition):
    pop, other = (build(partition=partition, clients=MANY, samples=12, seed=s) for s in (0, 1))
    sets = {tuple(sorted(pop.rows[i].tolist())) for i in range(50)}
    assert len(sets) == 50
    assert not torch.equal(pop.rows[0], other.rows[0])


@pytest.mark.parametrize("partition", DRAWN)
def test_rows_are_distinct_and_never_the_proxy(partition):
    pop = build(partition=partition, clients=200, samples=50, proxy=24)
    for rows in pop.rows:
        assert len(rows) == len(rows.unique()) == 50
        assert not torch.isin(rows, pop.proxy).any()


def test_sizes_take_and_histograms_agree_with_the_rows():
    pop = build(clients=MANY, samples=12)
    assert pop.num_clients == len(pop.sizes) == MANY
    assert pop.sizes.untyped_storage().nbytes() == 8  # one number, not a million
    ids = torch.tensor([999_999, 3])
    table, sizes = pop.take(ids)
    assert sizes.tolist() == [12, 12]
    assert torch.equal(table, torch.stack([pop.rows[999_999], pop.rows[3]]))
    labels = pop.dataset.y_train[table]
    counts = torch.stack([row.bincount(minlength=4) for row in labels])
    assert torch.equal(pop.label_histogram(ids), counts)
    assert pop.label_histogram(ids[:0]).shape == (0, 4)


@pytest.mark.parametrize(("classes", "samples"), [(1, 12), (2, 13), (4, 12)])
def test_label_skew_has_its_classes_in_equal_parts(classes, samples):
    pop = build(partition="label_skew", clients=300, samples=samples, classes_per_client=classes)
    counts = pop.label_histogram(torch.arange(300))
    assert ((counts > 0).sum(1) == classes).all()
    held = counts.float().masked_fill(counts == 0, torch.nan)
    assert all(row[row.isfinite()].max() - row[row.isfinite()].min() <= 1 for row in held)
    shares = (counts > 0).float().mean(0)  # every class is as likely as another
    assert (shares - classes / 4).abs().max() < 0.12


def test_dirichlet_follows_alpha_and_iid_follows_the_pool():
    def top_share(**choices):
        pop = build(clients=400, samples=40, **choices)
        return (pop.label_histogram(torch.arange(400)).max(1).values / 40).mean()

    skewed, even, pool = top_share(alpha=0.05), top_share(alpha=100), top_share(partition="iid")
    assert skewed > 0.85
    assert abs(even - pool) < 0.03
    assert pool < 0.45


def test_a_class_that_runs_out_is_filled_up_from_others():
    pop = build(clients=50, samples=200, alpha=0.01)  # a class has 54 rows in the pool
    assert all(len(rows.unique()) == 200 for rows in pop.rows)


@pytest.mark.parametrize(
    ("choices", "key"),
    [
        ({"samples": 217}, "data.samples"),
        ({"samples": 12, "partition": "subject"}, "data.partition"),
        ({"samples": 12, "partition": "shards"}, "data.exact_classes"),
        (
            {"samples": 12, "partition": "label_skew", "classes_per_client": 5},
            "data.classes_per_client",
        ),
        ({"samples": 1, "partition": "label_skew"}, "data.samples"),
        ({"samples": 109, "partition": "label_skew"}, "data.samples"),
    ],
)
def test_mistakes_name_the_setting(choices, key):
    with mistake(key):
        build(**choices)


def test_the_rarest_class_may_be_used_up():
    assert len(build(samples=108, partition="label_skew").rows[0]) == 108


def test_a_client_that_does_not_exist_is_refused():
    rows = build(clients=5, samples=12).rows
    for client in (-1, 5):
        with pytest.raises(IndexError):
            rows[client]


def test_the_configuration_reaches_the_population():
    config = Config(data=DataConfig(clients=MANY, samples=9, proxy=24))
    pop = population_of(config, make_dataset(), seed=3)
    assert isinstance(pop.rows, VirtualRows)
    assert len(pop.rows[MANY - 1]) == 9


# What these partitions gave before clients could draw their own rows; the first two with today's
# draws by weights (version.DRAWS).
DEALT = {
    "dirichlet": "37b6e002e12b20ae",
    "label_skew": "0cda1f2efd7c064b",
    "shards": "f3da33b6a7d6ceac",
    "iid": "39e85153126c3be5",
    "subject": "d772087937dfc266",
}


@pytest.mark.parametrize("partition", DEALT)
def test_dealt_partitions_are_untouched(partition):
    pop = build(partition=partition)
    text = repr(([rows.tolist() for rows in pop.rows], pop.proxy.tolist()))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DEALT[partition]
