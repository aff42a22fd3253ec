"""Who holds which rows: pure functions of labels and a generator.

Every function returns one tensor of row positions for each client. No row is given twice, and
nothing but the given generator is random.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from fedglimpse.errors import UserError

_MAX_DRAWS = 100


def iid(labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
    """Deal all rows at random; sizes differ by one at most."""
    _check_rows(len(labels), num_clients, 1)
    order = torch.randperm(len(labels), generator=generator)
    return list(torch.tensor_split(order, num_clients))


def by_subject(subjects: Tensor) -> list[Tensor]:
    """Give every subject's rows to one client, in the order of subject numbers."""
    return [torch.nonzero(subjects == s).flatten() for s in torch.unique(subjects)]


def random_shards(
    labels: Tensor, num_clients: int, shards_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Sort rows by label, cut them into equal shards and deal these at random.

    This is what the authors' release calls label skew: a client's shards may share a class, and a
    shard may straddle two. `len(labels) % (num_clients * shards_per_client)` random rows stay
    unused, so that all clients have the same size.
    """
    if shards_per_client < 1:
        raise UserError(f"data.classes_per_client={shards_per_client}; give at least 1")
    _check_rows(len(labels), num_clients, shards_per_client)
    num_shards = num_clients * shards_per_client
    used = len(labels) // num_shards * num_shards
    kept = torch.randperm(len(labels), generator=generator)[:used]
    by_label = kept[torch.argsort(labels[kept], stable=True)]
    shards = by_label.view(num_shards, -1)[torch.randperm(num_shards, generator=generator)]
    return list(shards.reshape(num_clients, -1))


def dirichlet_equal(
    labels: Tensor, num_clients: int, alpha: float, generator: torch.Generator
) -> list[Tensor]:
    """Give every client `n // N` rows of its own class mix from Dir(alpha): the paper's setting.

    A client fills its mix without replacement; when a class has run out, the rest of the mix is
    renormalised over classes that still have rows. Clients are served in random order: the last
    ones get what is left, and that must not depend on the client's number.
    """
    _check_rows(len(labels), num_clients, 1)
    pools = class_pools(labels, generator)
    left = torch.tensor([len(pool) for pool in pools])  # [C]
    mixes = dirichlet_mixes(alpha, (num_clients, len(pools)), generator)  # [N, C]
    clients: list[Tensor] = [torch.empty(0, dtype=torch.long)] * num_clients
    for client in torch.randperm(num_clients, generator=generator).tolist():
        counts = fill(mixes[client], left, len(labels) // num_clients, generator)  # [C]
        chosen = [
            pool[start - count : start]
            for pool, start, count in zip(pools, left.tolist(), counts.tolist(), strict=True)
        ]
        clients[client] = torch.cat(chosen)
        left = left - counts
    return clients


def dirichlet_unequal(
    labels: Tensor, num_clients: int, alpha: float, min_size: int, generator: torch.Generator
) -> list[Tensor]:
    """Split every class over the clients by Dir(alpha); sizes differ widely.

    The usual code redraws until the smallest client has `min_size` rows, which may never happen.
    Here the best of at most 100 draws is kept and, if need be, repaired with rows of the largest
    clients. With `min_size=0` a client may be empty.
    """
    if min_size < 0:
        raise UserError(f"data.min_size={min_size}; give 0 or more")
    _check_rows(len(labels), num_clients, min_size)
    pools = class_pools(labels, generator)
    totals = torch.tensor([len(pool) for pool in pools])  # [C]
    best = torch.empty(0, 0)
    for draw in range(_MAX_DRAWS):
        shares = dirichlet_mixes(alpha, (len(pools), num_clients), generator)
        ends = (shares.cumsum(1) * totals[:, None]).long().clamp(max=totals[:, None])
        ends[:, -1] = totals
        counts = ends.diff(dim=1, prepend=torch.zeros(len(pools), 1, dtype=torch.long))  # [C, N]
        if draw == 0 or counts.sum(0).min() > best.sum(0).min():
            best = counts
        if best.sum(0).min() >= min_size:
            break
    pieces = [
        torch.split_with_sizes(pool, row.tolist()) for pool, row in zip(pools, best, strict=True)
    ]
    clients = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    return _repair(clients, min_size, generator)


def label_skew(
    labels: Tensor, num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Give every client exactly `classes_per_client` classes and the same number of rows.

    Classes are handed out as often as their rows allow (`_quotas`), then drawn for each client.
    All clients then grow one row at a time, each by its own rarest class that still has rows,
    until one of them cannot: sizes are equal and the classes of a client about even.
    """
    pools = class_pools(labels, generator)
    totals = [len(pool) for pool in pools]
    quotas = _quotas(totals, num_clients, classes_per_client, generator)
    classes = _deal(quotas, num_clients, classes_per_client, generator)
    even = min(total // quota for total, quota in zip(totals, quotas, strict=True) if quota)
    counts = [dict.fromkeys(mine, even) for mine in classes]
    left = [total - even * quota for total, quota in zip(totals, quotas, strict=True)]
    while taken := _one_more_each(counts, left):
        for mine, label in zip(counts, taken, strict=True):
            mine[label] += 1
    starts = [0] * len(pools)
    clients = []
    for mine in counts:
        chosen = []
        for label, count in mine.items():
            chosen.append(pools[label][starts[label] : starts[label] + count])
            starts[label] += count
        clients.append(torch.cat(chosen))
    return clients


def stratified_sample(
    labels: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `size` rows that keep every class's share to within one row.

    Returns:
        The drawn rows and all other rows, both sorted.
    """
    pools = class_pools(labels, generator)
    totals = torch.tensor([len(pool) for pool in pools])  # [C]
    counts = totals * size // len(labels)
    remainders = totals * size % len(labels)
    ties = torch.randperm(len(pools), generator=generator)
    largest_first = ties[torch.argsort(remainders[ties], descending=True, stable=True)]
    counts[largest_first[: size - int(counts.sum())]] += 1
    drawn = [pool[:count] for pool, count in zip(pools, counts.tolist(), strict=True)]
    rest = [pool[count:] for pool, count in zip(pools, counts.tolist(), strict=True)]
    return torch.cat(drawn).sort().values, torch.cat(rest).sort().values


def _check_rows(num_rows: int, num_clients: int, rows_each: int) -> None:
    if num_clients < 1:
        raise UserError(f"data.clients={num_clients}; give at least 1")
    if num_rows < max(1, num_clients * rows_each):
        raise UserError(
            f"{num_clients} clients with at least {rows_each} rows each need "
            f"{num_clients * rows_each} rows, but there are {num_rows}; use at most "
            f"{num_rows // max(1, rows_each)} clients, a larger dataset, or data.samples=20, with "
            "which clients draw their rows"
        )


def class_pools(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return the shuffled rows of every class that occurs."""
    order = torch.randperm(len(labels), generator=generator)
    sizes = torch.unique(labels, return_counts=True)[1]
    by_label = order[torch.argsort(labels[order], stable=True)]
    return list(torch.split_with_sizes(by_label, sizes.tolist()))


def dirichlet_mixes(alpha: float, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw rows from Dir(alpha), in logarithms so that a tiny alpha cannot give 0 / 0.

    If G ~ Gamma(alpha + 1) and U ~ Uniform(0, 1), then G * U**(1 / alpha) ~ Gamma(alpha).
    """
    if not 0 < alpha < float("inf"):
        raise UserError(f"data.alpha={alpha}; give a positive number such as 0.1")
    gamma = torch._standard_gamma(
        torch.full(shape, alpha + 1, dtype=torch.float64), generator=generator
    )
    uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator)  # in (0, 1]
    return torch.softmax(gamma.log() + uniform.log() / alpha, dim=1)


def fill(mix: Tensor, left: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw `size` rows' classes from `mix` out of what is `left`; returns counts [C].

    Each pass ends the work or empties a class, so there are at most C + 1.
    """
    counts = torch.zeros_like(left)
    while (need := size - int(counts.sum())) > 0:
        weights = mix * (counts < left)
        if float(weights.sum()) < 1e-300:  # the mix has nothing but classes that ran out
            weights = (left - counts).double()
        drawn = torch.multinomial(weights, need, replacement=True, generator=generator)
        counts = torch.minimum(counts + drawn.bincount(minlength=len(left)), left)
    return counts


def _repair(clients: list[Tensor], min_size: int, generator: torch.Generator) -> list[Tensor]:
    """Move random rows from the largest clients to those below `min_size`.

    Each step fills a client or brings a donor down to `min_size`, so it ends; the caller has
    checked that there are rows enough.
    """
    sizes = torch.tensor([len(rows) for rows in clients])
    for poor in torch.nonzero(sizes < min_size).flatten().tolist():
        while sizes[poor] < min_size:
            donor = int(sizes.argmax())
            moved = min(min_size - int(sizes[poor]), int(sizes[donor]) - min_size)
            rows = clients[donor][torch.randperm(len(clients[donor]), generator=generator)]
            clients[poor] = torch.cat([clients[poor], rows[:moved]])
            clients[donor] = rows[moved:]
            sizes[poor] += moved
            sizes[donor] -= moved
    return clients


def _quotas(
    totals: list[int], num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[int]:
    """Return how many clients get each class, so that the rows for each are as many as can be.

    Each next slot goes to the class that would then still have the most rows for a slot (the
    D'Hondt rule), after every class had one. No class goes to more clients than it has rows.
    """
    if not 1 <= classes_per_client <= len(totals):
        raise UserError(
            f"data.classes_per_client={classes_per_client}, but the rows have "
            f"{len(totals)} classes; give 1..{len(totals)}"
        )
    _check_rows(sum(totals), num_clients, classes_per_client)
    slots = num_clients * classes_per_client
    caps = [min(num_clients, total) for total in totals]
    if sum(caps) < slots:
        raise UserError(
            f"{num_clients} clients with exactly {classes_per_client} classes each need {slots} "
            f"(client, class) pairs, but classes of {totals} rows allow {sum(caps)}; "
            "use fewer data.clients or data.classes_per_client"
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


def _deal(
    quotas: list[int], num_clients: int, classes_per_client: int, generator: torch.Generator
) -> list[list[int]]:
    """Draw distinct classes for every client so that each class is used `quotas` times.

    A class that as many clients must still get as are left is given at once; with that, the
    others can be drawn freely and the quotas always work out.
    """
    left = torch.tensor(quotas, dtype=torch.float64)  # [C]
    dealt: list[list[int]] = [[]] * num_clients
    order = torch.randperm(num_clients, generator=generator).tolist()
    for waiting, client in zip(range(num_clients, 0, -1), order, strict=True):
        forced = torch.nonzero(left == waiting).flatten()
        free = left.masked_fill(left == waiting, 0)
        wanted = classes_per_client - len(forced)
        if wanted:
            forced = torch.cat([forced, torch.multinomial(free, wanted, generator=generator)])
        left[forced] -= 1
        dealt[client] = forced.tolist()
    return dealt


def _one_more_each(counts: list[dict[int, int]], left: list[int]) -> list[int]:
    """Take one more row for every client and return its class, or [] if one gets none."""
    taken = []
    for mine in counts:
        open_classes = [label for label in mine if left[label]]
        if not open_classes:
            return []
        label = min(open_classes, key=mine.__getitem__)
        left[label] -= 1
        taken.append(label)
    return taken
