"""How training rows are split among clients: the functions behind `data.partition`.

To add a partition, write a function like `iid` and register it in `PARTITIONS`, at the end of this
file. Every function returns one tensor of row positions for each client. No row is given to two
clients, and only the given generator is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedglimpse.errors import require
from fedglimpse.plugins import ImportedOnUse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedglimpse import rng
    from fedglimpse.data.config import DataConfig

    # (labels [n], number of clients, generator, settings) -> row positions of each client
    Split = Callable[[Tensor, int, torch.Generator, DataConfig], Sequence[Tensor]]
    DrawCounts = Callable[[torch.Generator], Tensor]  # returns how many rows of each class  # [C]
    # (rows of each class in the pool [C], settings) -> what draws the mix of one client
    Mix = Callable[[Tensor, DataConfig], DrawCounts]
else:  # settings are read and checked without waiting for torch
    torch = ImportedOnUse("torch")
    rng = ImportedOnUse("fedglimpse.rng")

_MAX_DRAWS = 100


@dataclass(frozen=True)
class PartitionFunctions:
    """How one choice of `data.partition` is computed.

    Attributes:
        split: gives every row to one client at most. By subject, it gets the subject of every row
            instead of its label.
        mix: with `data.samples`, the classes that a client draws; None: clients cannot draw.
        meaning: one line for the documentation.
        settings: the names of `data.*` that it reads.
        by_subject: every client is one subject, so the data say how many there are.
    """

    split: Split
    mix: Mix | None = None
    meaning: str = ""
    settings: tuple[str, ...] = ()
    by_subject: bool = False


def iid(
    labels: Tensor, num_clients: int, generator: torch.Generator, settings: DataConfig
) -> list[Tensor]:
    """Deal all rows at random; sizes differ by one at most."""
    _check_rows(len(labels), num_clients, 1)
    order = torch.randperm(len(labels), generator=generator)
    return list(torch.tensor_split(order, num_clients))


def by_subject(
    subjects: Tensor, num_clients: int, generator: torch.Generator, settings: DataConfig
) -> list[Tensor]:
    """Give every subject's rows to one client, in the order of subject numbers."""
    subject_numbers = torch.unique(subjects)
    require(
        num_clients in (0, len(subject_numbers)),
        f"data.clients={num_clients}, but the training rows come from {len(subject_numbers)} "
        f"subjects: give 0 or {len(subject_numbers)}.",
        key="data.clients",
    )
    return [torch.nonzero(subjects == subject).flatten() for subject in subject_numbers]


def dirichlet(
    labels: Tensor, num_clients: int, generator: torch.Generator, settings: DataConfig
) -> list[Tensor]:
    """Give every client its own mix of classes, drawn from Dir(alpha)."""
    if settings.equal_size:
        return dirichlet_equal(labels, num_clients, settings.alpha, generator)
    return dirichlet_unequal(labels, num_clients, settings.alpha, settings.min_size, generator)


def label_skew(
    labels: Tensor, num_clients: int, generator: torch.Generator, settings: DataConfig
) -> list[Tensor]:
    """Give every client rows of few classes."""
    if settings.exact_classes:
        return exact_classes(labels, num_clients, settings.classes_per_client, generator)
    return random_shards(labels, num_clients, settings.classes_per_client, generator)


def random_shards(
    labels: Tensor, num_clients: int, shards_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Sort rows by label, cut them into equal shards and deal these at random.

    This is what the authors' release calls label skew: a client's shards may share a class, and a
    shard may straddle two. `len(labels) % (num_clients * shards_per_client)` random rows stay
    unused, so that all clients have the same size.
    """
    _check_rows(len(labels), num_clients, shards_per_client)
    num_shards = num_clients * shards_per_client
    used = len(labels) // num_shards * num_shards
    rows = torch.randperm(len(labels), generator=generator)[:used]
    by_label = rows[torch.argsort(labels[rows], stable=True)]
    shards = by_label.view(num_shards, -1)
    shuffled = shards[torch.randperm(num_shards, generator=generator)]
    return list(shuffled.reshape(num_clients, -1))


def dirichlet_equal(
    labels: Tensor, num_clients: int, alpha: float, generator: torch.Generator
) -> list[Tensor]:
    """Give every client `n // N` rows of its own class mix from Dir(alpha): the paper's setting.

    A client fills its mix without replacement; when a class has run out, the rest of the mix is
    renormalised over classes that still have rows. Clients are served in random order: the last
    ones get what remains, and that must not depend on the client's number.
    """
    _check_rows(len(labels), num_clients, 1)
    pools = class_pools(labels, generator)
    remaining = class_sizes(pools)  # [C]
    mixes = rng.dirichlet(alpha, (num_clients, len(pools)), generator)  # [N, C]
    clients: list[Tensor] = [torch.empty(0, dtype=torch.long)] * num_clients
    for client in torch.randperm(num_clients, generator=generator).tolist():
        counts = fill(mixes[client], remaining, len(labels) // num_clients, generator)  # [C]
        after = remaining - counts
        rows = []
        for pool, start, stop in zip(pools, after.tolist(), remaining.tolist(), strict=True):
            rows.append(pool[start:stop])
        clients[client] = torch.cat(rows)
        remaining = after
    return clients


def dirichlet_unequal(
    labels: Tensor, num_clients: int, alpha: float, min_size: int, generator: torch.Generator
) -> list[Tensor]:
    """Split every class over the clients by Dir(alpha); sizes differ widely.

    The usual code redraws until the smallest client has `min_size` rows, which may never happen.
    Here the best of at most 100 draws is kept and, if need be, repaired with rows of the largest
    clients. With `min_size=0` a client may be empty.
    """
    _check_rows(len(labels), num_clients, min_size)
    pools = class_pools(labels, generator)
    totals = class_sizes(pools)  # [C]
    best = _dirichlet_counts(totals, num_clients, alpha, generator)
    for _ in range(_MAX_DRAWS - 1):
        if best.sum(0).min() >= min_size:
            break
        counts = _dirichlet_counts(totals, num_clients, alpha, generator)
        if counts.sum(0).min() > best.sum(0).min():
            best = counts
    rows: list[list[Tensor]] = [[] for _ in range(num_clients)]
    for pool, counts in zip(pools, best, strict=True):
        for client, piece in enumerate(torch.split_with_sizes(pool, counts.tolist())):
            rows[client].append(piece)
    clients = [torch.cat(pieces) for pieces in rows]
    return _repair(clients, min_size, generator)


def _dirichlet_counts(
    totals: Tensor, num_clients: int, alpha: float, generator: torch.Generator
) -> Tensor:
    """Draw how many rows of each class go to each client `[C, N]`."""
    num_classes = len(totals)
    shares = rng.dirichlet(alpha, (num_classes, num_clients), generator)  # [C, N]
    ends = (shares.cumsum(1) * totals[:, None]).long().clamp(max=totals[:, None])
    ends[:, -1] = totals
    return ends.diff(dim=1, prepend=torch.zeros(num_classes, 1, dtype=torch.long))


def exact_classes(
    labels: Tensor, num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Give every client exactly `classes_per_client` classes and the same number of rows.

    Classes are handed out as often as their rows allow (`_quotas`), then drawn for each client.
    All clients then grow one row at a time, each by its own rarest class that still has rows,
    until one of them cannot: sizes are equal and the classes of a client about even.
    """
    pools = class_pools(labels, generator)
    totals = class_sizes(pools).tolist()
    quotas = _quotas(totals, num_clients, classes_per_client, generator)
    classes = _draw_classes(quotas, num_clients, classes_per_client, generator)
    shares = [total // quota for total, quota in zip(totals, quotas, strict=True) if quota]
    first_rows = min(shares)  # of each of its classes, a client gets at least so many
    counts = [dict.fromkeys(labels_of_client, first_rows) for labels_of_client in classes]
    remaining = []
    for total, quota in zip(totals, quotas, strict=True):
        remaining.append(total - first_rows * quota)
    while labels_taken := _one_more_each(counts, remaining):
        for client, label in enumerate(labels_taken):
            counts[client][label] += 1
    starts = [0] * len(pools)
    clients = []
    for counts_of_client in counts:
        rows = []
        for label, count in counts_of_client.items():
            rows.append(pools[label][starts[label] : starts[label] + count])
            starts[label] += count
        clients.append(torch.cat(rows))
    return clients


def stratified_sample(
    labels: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `size` rows that keep every class's share to within one row.

    Returns:
        The drawn rows and all other rows, both sorted.
    """
    pools = class_pools(labels, generator)
    totals = class_sizes(pools)  # [C]
    counts = totals * size // len(labels)
    remainders = totals * size % len(labels)
    ties = torch.randperm(len(pools), generator=generator)
    largest_first = ties[torch.argsort(remainders[ties], descending=True, stable=True)]
    counts[largest_first[: size - int(counts.sum())]] += 1
    drawn = []
    not_drawn = []
    for pool, count in zip(pools, counts.tolist(), strict=True):
        drawn.append(pool[:count])
        not_drawn.append(pool[count:])
    return torch.cat(drawn).sort().values, torch.cat(not_drawn).sort().values


def _check_rows(num_rows: int, num_clients: int, rows_each: int) -> None:
    most = num_rows // max(1, rows_each)
    require(
        0 < num_clients <= most,
        f"{num_clients} clients with at least {rows_each} rows each need {num_clients * rows_each} "
        f"rows, but there are {num_rows}: use at most {most} clients, a larger dataset, or "
        "data.samples=20, with which clients draw their rows.",
        key="data.clients",
    )


def class_pools(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return the shuffled rows of every class that occurs."""
    order = torch.randperm(len(labels), generator=generator)
    sizes = torch.unique(labels, return_counts=True)[1]
    by_label = order[torch.argsort(labels[order], stable=True)]
    return list(torch.split_with_sizes(by_label, sizes.tolist()))


def class_sizes(pools: Sequence[Tensor]) -> Tensor:
    """Return how many rows each class has `[C]`."""
    return torch.tensor([len(pool) for pool in pools])


def fill(mix: Tensor, remaining: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw `size` rows' classes from `mix` out of the `remaining` rows; returns counts [C].

    Each pass ends the work or empties a class, so there are at most C + 1.
    """
    counts = torch.zeros_like(remaining)
    while (need := size - int(counts.sum())) > 0:
        weights = mix * (counts < remaining)
        if float(weights.max()) < 1e-300:  # the mix has nothing but classes that ran out
            weights = (remaining - counts).double()
        drawn = rng.choices(weights, need, generator)
        counts = torch.minimum(counts + drawn.bincount(minlength=len(remaining)), remaining)
    return counts


def _repair(clients: list[Tensor], min_size: int, generator: torch.Generator) -> list[Tensor]:
    """Move random rows from the largest clients to those below `min_size`.

    Each step fills a client or brings a donor down to `min_size`, so it ends; the caller has
    checked that there are enough rows.
    """
    sizes = class_sizes(clients)  # [N]
    for small in torch.nonzero(sizes < min_size).flatten().tolist():
        while sizes[small] < min_size:
            donor = int(sizes.argmax())
            missing = min_size - int(sizes[small])
            spare = int(sizes[donor]) - min_size
            moved = min(missing, spare)
            rows = clients[donor][torch.randperm(len(clients[donor]), generator=generator)]
            clients[small] = torch.cat([clients[small], rows[:moved]])
            clients[donor] = rows[moved:]
            sizes[small] += moved
            sizes[donor] -= moved
    return clients


def _quotas(
    totals: list[int], num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[int]:
    """Return how many clients get each class, so that the rows for each are as many as can be.

    Each next slot goes to the class that would then still have the most rows for a slot (the
    D'Hondt rule), after every class had one. No class goes to more clients than it has rows.
    """
    _check_classes(classes_per_client, len(totals))
    _check_rows(sum(totals), num_clients, classes_per_client)
    slots = num_clients * classes_per_client
    caps = [min(num_clients, total) for total in totals]
    require(
        slots <= sum(caps),
        f"{num_clients} clients with exactly {classes_per_client} classes each need {slots} "
        f"(client, class) pairs, but classes of {totals} rows allow {sum(caps)}: use fewer "
        "data.clients or data.classes_per_client.",
        key="data.classes_per_client",
    )
    quotas = [0] * len(totals)
    order = torch.randperm(len(totals), generator=generator).tolist()  # settles ties
    heap = [(-float("inf"), tie, label) for tie, label in enumerate(order)]
    heapq.heapify(heap)
    for _ in range(slots):
        _, tie, label = heapq.heappop(heap)
        quotas[label] += 1
        if quotas[label] < caps[label]:
            heapq.heappush(heap, (-totals[label] / (quotas[label] + 1), tie, label))
    return quotas


def _check_classes(classes_per_client: int, num_classes: int) -> None:
    require(
        classes_per_client <= num_classes,
        f"data.classes_per_client={classes_per_client}, but the training rows have {num_classes} "
        f"classes: give 1 to {num_classes}.",
        key="data.classes_per_client",
    )


def _draw_classes(
    quotas: list[int], num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[list[int]]:
    """Draw distinct classes for every client so that each class is used `quotas` times.

    A class that every further client must get is given at once; with that, the
    others can be drawn freely and the quotas always work out.
    """
    remaining = torch.tensor(quotas, dtype=torch.float64)  # [C]
    classes: list[list[int]] = [[]] * num_clients
    order = torch.randperm(num_clients, generator=generator).tolist()
    for position, client in enumerate(order):
        clients_left = num_clients - position
        drawn = torch.nonzero(remaining == clients_left).flatten()
        missing = classes_per_client - len(drawn)
        if missing:
            weights = remaining.masked_fill(remaining == clients_left, 0)
            free = rng.sample(weights, missing, generator)
            drawn = torch.cat([drawn, free])
        remaining[drawn] -= 1
        classes[client] = drawn.tolist()
    return classes


def _one_more_each(counts: list[dict[int, int]], remaining: list[int]) -> list[int]:
    """Take one more row for every client and return its class, or [] if one gets none."""
    labels_taken = []
    for counts_of_client in counts:
        open_classes = [label for label in counts_of_client if remaining[label]]
        if not open_classes:
            return []
        label = min(open_classes, key=counts_of_client.__getitem__)
        remaining[label] -= 1
        labels_taken.append(label)
    return labels_taken


def iid_mix(totals: Tensor, settings: DataConfig) -> DrawCounts:
    """Draw classes in the shares that the pool has."""

    def draw_counts(generator: torch.Generator) -> Tensor:
        return fill(totals.double(), totals, settings.samples, generator)

    return draw_counts


def dirichlet_mix(totals: Tensor, settings: DataConfig) -> DrawCounts:
    """Draw classes in the shares of the client's own draw from Dir(alpha)."""

    def draw_counts(generator: torch.Generator) -> Tensor:
        mix = rng.dirichlet(settings.alpha, (1, len(totals)), generator)[0]
        return fill(mix, totals, settings.samples, generator)

    return draw_counts


def label_skew_mix(totals: Tensor, settings: DataConfig) -> DrawCounts:
    """Draw `classes_per_client` classes, the same number of rows of each."""
    num_classes = settings.classes_per_client
    samples = settings.samples
    require(
        settings.exact_classes,
        f"data.exact_classes=false deals shards out, so clients cannot draw data.samples={samples} "
        "rows of their own: use data.exact_classes=true, or data.samples=0.",
        key="data.exact_classes",
    )
    _check_classes(num_classes, len(totals))
    rarest = int(totals.min())
    require(
        num_classes <= samples and -(-samples // num_classes) <= rarest,
        f"data.samples={samples} rows of {num_classes} classes need at least one of each, and at "
        f"most {rarest} of each, the size of the rarest class: give "
        f"data.samples={num_classes} to {rarest * num_classes}.",
        key="data.samples",
    )
    rows_of_class = torch.full((num_classes,), samples // num_classes)
    rows_of_class[: samples % num_classes] += 1

    def draw_counts(generator: torch.Generator) -> Tensor:
        classes = torch.randperm(len(totals), generator=generator)[:num_classes]
        return torch.zeros_like(totals).index_copy(0, classes, rows_of_class)

    return draw_counts


PARTITIONS: dict[str, PartitionFunctions] = {
    "dirichlet": PartitionFunctions(
        dirichlet,
        dirichlet_mix,
        "every client has its own mix of classes, from Dir(alpha)",
        settings=("alpha", "equal_size", "min_size"),
    ),
    "label_skew": PartitionFunctions(
        label_skew,
        label_skew_mix,
        "every client has few classes: exactly so many, or random shards as in the release",
        settings=("classes_per_client", "exact_classes"),
    ),
    "iid": PartitionFunctions(iid, iid_mix, "all rows at random"),
    "subject": PartitionFunctions(
        by_subject, meaning="one client for every subject", by_subject=True
    ),
}
