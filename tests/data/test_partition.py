import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedglimpse import rng
from fedglimpse.data import partition as cut
from fedglimpse.data.config import DataConfig
from fedglimpse.data.partition import PARTITIONS
from fedglimpse.errors import UserError
from mistakes import mistake

quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
seeds = st.integers(0, 2**31)
class_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=8)
alphas = st.sampled_from([1e-6, 0.01, 0.1, 1.0, 100.0])


def labels_of(sizes, seed=0):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=draw(seed))]


def draw(seed):
    return torch.Generator().manual_seed(seed)


def check_valid(clients, num_clients, num_rows):
    assert len(clients) == num_clients
    rows = torch.cat(clients)
    assert rows.dtype == torch.long
    assert len(rows.unique()) == len(rows)  # disjoint, and no row twice
    assert not len(rows) or (rows.min() >= 0 and rows.max() < num_rows)


def sizes_of(clients):
    return [len(rows_of_client) for rows_of_client in clients]


SETTINGS = {
    "iid": DataConfig(partition="iid"),
    "shards": DataConfig(partition="label_skew", exact_classes=False),
    "label_skew": DataConfig(partition="label_skew"),
    "equal": DataConfig(partition="dirichlet", alpha=0.5),
    "unequal": DataConfig(partition="dirichlet", alpha=0.5, equal_size=False, min_size=3),
}


def by_name(name, labels, generator):
    data = SETTINGS[name]
    return cut.PARTITIONS[data.partition].split(labels, 5, generator, data)


@pytest.mark.parametrize("name", SETTINGS)
def test_same_seed_same_split_another_seed_another(name):
    labels = labels_of([40, 30, 50, 20])
    first, repeated, other = (by_name(name, labels, draw(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_global_random_state_is_neither_read_nor_changed(name):
    labels = labels_of([40, 30, 50, 20])
    before = torch.random.get_rng_state()
    first = by_name(name, labels, draw(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        second = by_name(name, labels, draw(1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@quick
@given(class_sizes, st.integers(1, 30), seeds)
def test_iid_covers_all_rows_evenly(sizes, num_clients, seed):
    labels = labels_of(sizes)
    num_clients = min(num_clients, len(labels))
    clients = cut.iid(labels, num_clients, draw(seed), DataConfig())
    check_valid(clients, num_clients, len(labels))
    assert torch.equal(torch.cat(clients).sort().values, torch.arange(len(labels)))
    assert max(sizes_of(clients)) - min(sizes_of(clients)) <= 1


@quick
@given(class_sizes, st.integers(1, 30), alphas, seeds)
def test_dirichlet_equal_always_gives_equal_sizes(sizes, num_clients, alpha, seed):
    labels = labels_of(sizes)
    num_clients = min(num_clients, len(labels))
    clients = cut.dirichlet_equal(labels, num_clients, alpha, draw(seed))
    check_valid(clients, num_clients, len(labels))
    assert set(sizes_of(clients)) == {len(labels) // num_clients}


@quick
@given(class_sizes, st.integers(1, 30), alphas, st.integers(0, 12), seeds)
def test_dirichlet_unequal_gives_all_rows_and_min_size(sizes, num_clients, alpha, least, seed):
    labels = labels_of(sizes)
    num_clients = min(num_clients, len(labels))
    least = min(least, len(labels) // num_clients)
    clients = cut.dirichlet_unequal(labels, num_clients, alpha, least, draw(seed))
    check_valid(clients, num_clients, len(labels))
    assert sum(sizes_of(clients)) == len(labels)
    assert min(sizes_of(clients)) >= least


@quick
@given(class_sizes, st.integers(1, 30), st.integers(1, 5), seeds)
def test_label_skew_gives_exact_classes_and_equal_sizes(sizes, num_clients, per_client, seed):
    labels = labels_of(sizes)
    feasible = sum(min(num_clients, size) for size in sizes) >= num_clients * per_client
    if per_client > len(sizes) or not feasible:
        with pytest.raises(UserError):
            cut.exact_classes(labels, num_clients, per_client, draw(seed))
        return
    clients = cut.exact_classes(labels, num_clients, per_client, draw(seed))
    check_valid(clients, num_clients, len(labels))
    assert {len(labels[rows_of_client].unique()) for rows_of_client in clients} == {per_client}
    assert len(set(sizes_of(clients))) == 1


@quick
@given(st.integers(20, 60), st.integers(2, 8), st.integers(1, 12), st.integers(1, 4), seeds)
def test_label_skew_on_balanced_classes(size, num_classes, num_clients, per_client, seed):
    labels = labels_of([size] * num_classes)
    per_client = min(per_client, num_classes)
    clients = cut.exact_classes(labels, num_clients, per_client, draw(seed))
    counts = torch.stack(
        [labels[rows_of_client].bincount(minlength=num_classes) for rows_of_client in clients]
    )
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1  # no class is given more often than another
    if num_clients * per_client % num_classes == 0:
        rows_of_class = size // (num_clients * per_client // num_classes)
        assert (counts[counts > 0] - rows_of_class).abs().max() <= 1
        assert len(clients[0]) >= per_client * rows_of_class  # next to nothing stays unused


def test_label_skew_pairs_are_varied():
    labels = labels_of([500] * 10)
    pairs = {tuple(labels[p].unique().tolist()) for p in cut.exact_classes(labels, 100, 2, draw(0))}
    assert len(pairs) > 30  # of 45


def test_label_skew_does_not_let_a_rare_class_shrink_everyone():
    labels = labels_of([5000, 5000, 10])
    clients = cut.exact_classes(labels, 10, 2, draw(0))
    assert len(clients[0]) > 850  # an even split of the client with the rare class would give 20


@quick
@given(class_sizes, st.integers(1, 15), st.integers(1, 4), seeds)
def test_random_shards_are_equal_and_nearly_pure(sizes, num_clients, shards, seed):
    labels = labels_of(sizes)
    if num_clients * shards > len(labels):
        with mistake("data.clients"):
            cut.random_shards(labels, num_clients, shards, draw(seed))
        return
    clients = cut.random_shards(labels, num_clients, shards, draw(seed))
    check_valid(clients, num_clients, len(labels))
    shard = len(labels) // (num_clients * shards)
    assert set(sizes_of(clients)) == {shard * shards}
    pieces = [
        labels[piece] for rows_of_client in clients for piece in rows_of_client.view(shards, shard)
    ]
    straddling = sum(len(piece.unique()) > 1 for piece in pieces)
    assert straddling <= len(sizes) - 1  # at most one shard at each border between classes


def test_by_subject_keeps_people_together():
    subjects = torch.tensor([7, 2, 7, 9, 2])
    clients = cut.by_subject(subjects, 0, draw(0), DataConfig())
    assert [rows_of_client.tolist() for rows_of_client in clients] == [[1, 4], [0, 2], [3]]


@quick
@given(class_sizes, st.floats(0, 1), seeds)
def test_stratified_sample_keeps_shares_to_within_one_row(sizes, share, seed):
    labels = labels_of(sizes)
    size = int(share * len(labels))
    drawn, not_drawn = cut.stratified_sample(labels, size, draw(seed))
    assert len(drawn) == size
    assert torch.equal(torch.cat([drawn, not_drawn]).sort().values, torch.arange(len(labels)))
    counts = labels[drawn].bincount(minlength=len(sizes))
    exact = torch.tensor(sizes) * size / len(labels)
    assert (counts - exact).abs().max() < 1


def test_dirichlet_draws_follow_the_distribution():
    alpha, classes = 0.3, 5
    mixes = rng.dirichlet(alpha, (20_000, classes), draw(0))
    mean, total = 1 / classes, alpha * classes
    assert torch.allclose(mixes.mean(0), torch.full((classes,), mean).double(), atol=0.01)
    variance = mean * (1 - mean) / (total + 1)
    assert torch.allclose(mixes.var(0), torch.full((classes,), variance).double(), atol=0.005)


def test_tiny_alpha_gives_single_class_mixes_of_every_class():
    mixes = rng.dirichlet(1e-8, (200, 4), draw(0))
    assert torch.isfinite(mixes).all()
    assert mixes.max(1).values.min() > 0.99
    assert len(mixes.argmax(1).unique()) == 4


def test_alpha_decides_how_mixed_clients_are():
    labels = labels_of([500] * 10)

    def largest_share(alpha):
        clients = cut.dirichlet_equal(labels, 20, alpha, draw(0))
        return sum(labels[p].bincount().max().item() / len(p) for p in clients) / 20

    assert largest_share(0.05) > 0.7 > 0.3 > largest_share(100.0)


def test_leftovers_do_not_fall_to_the_highest_client_numbers():
    """Served in the order of their numbers, the last two would share what is left."""
    labels = labels_of([100] * 10)
    first = last = 0.0
    for seed in range(40):
        clients = cut.dirichlet_equal(labels, 20, 0.05, draw(seed))
        counts = torch.stack([labels[p].bincount(minlength=10) for p in clients])
        first += torch.minimum(counts[0], counts[1]).sum().item() / 50 / 40
        last += torch.minimum(counts[-2], counts[-1]).sum().item() / 50 / 40
    assert abs(first - last) < 0.1


def test_unreachable_min_size_is_repaired_and_not_retried_for_ever():
    labels = labels_of([200] * 5)
    start = time.perf_counter()
    clients = cut.dirichlet_unequal(labels, 100, 0.001, 10, draw(0))
    assert sizes_of(clients) == [10] * 100
    assert time.perf_counter() - start < 5


def test_unequal_needs_no_repair_where_the_usual_code_finishes():
    clients = cut.dirichlet_unequal(labels_of([500] * 10), 10, 0.5, 10, draw(0))
    assert max(sizes_of(clients)) > 2 * min(sizes_of(clients))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda y, g: cut.iid(y, 31, g, DataConfig()), "data.clients"),
        (lambda y, g: cut.iid(y[:0], 1, g, DataConfig()), "data.clients"),
        (lambda y, g: cut.dirichlet_equal(y, 40, 0.1, g), "data.clients"),
        (lambda y, g: cut.dirichlet_unequal(y, 4, 0.1, 8, g), "data.clients"),
        (lambda y, g: cut.exact_classes(y, 4, 4, g), "data.classes_per_client"),
        (lambda y, g: cut.exact_classes(y, 20, 2, g), "data.clients"),
        (lambda y, g: cut.random_shards(y, 16, 2, g), "data.clients"),
    ],
)
def test_impossible_requests_name_the_setting(call, key):
    with mistake(key):
        call(labels_of([10, 10, 10]), draw(0))


def test_classes_too_rare_to_share_are_refused():
    with mistake("data.classes_per_client"):
        cut.exact_classes(labels_of([100, 1]), 10, 2, draw(0))


def test_every_partition_names_settings_that_exist():
    for kind in PARTITIONS.values():
        assert kind.meaning
        assert all(hasattr(DataConfig(), name) for name in kind.settings)
