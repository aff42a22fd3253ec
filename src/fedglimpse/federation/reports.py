"""What a selector may ask for, when it becomes known, and what it costs to send.

A name listed in `Selector.needs` decides when clients train (`phase`) and what travels. Adding a
report means one entry here and one function in `simulation/client_reports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedglimpse.errors import UserError, nearest, require

Phase = Literal["probe", "trained", "server"]


@dataclass(frozen=True)
class Sizes:
    """The lengths that costs are made of, in floats or examples."""

    state: int  # d, floats in a model
    sketch: int  # D
    proxy: int  # examples in the server's proxy set
    classes: int  # C


@dataclass(frozen=True)
class Need:
    """One kind of information a selector or an aggregator can ask for.

    Phases: "probe" is computed by a client at the model it received, before any training;
    "trained" needs the client to have trained; "server" costs clients nothing.
    A selector's `needs` are charged to every visible client, `learns_from` and an aggregator's
    `needs` to the chosen ones only, and not where the server can read them off the upload.
    """

    phase: Phase
    meaning: str
    up: Callable[[Sizes], int] = lambda s: 0  # floats each client sends
    down: Callable[[Sizes], int] = lambda s: 0  # floats each client receives besides the model
    client_passes: float = 0  # over its local examples: 1 forward, 3 forward and backward
    client_proxy_passes: float = 0  # over the proxy examples, on the client
    server_passes: float = 0  # over the proxy examples, once for each round
    server_passes_each: float = 0  # over the proxy examples, for each client
    from_upload: bool = False  # the server can work it out from an uploaded model
    uploads_model: bool = False  # the whole update is sent, so that choosing saves no uplink
    oracle: bool = False  # reads what no server may know; only for upper references


CATALOGUE: dict[str, Need] = {
    "sketch": Need(
        "trained",
        "random projection of the client's parameters",
        lambda s: s.sketch,
        from_upload=True,
    ),
    "delta_sketch": Need(
        "trained",
        "random projection of the client's update W_i - W",
        lambda s: s.sketch,
        from_upload=True,
    ),
    "update_norm": Need(
        "trained", "L2 norm of the client's parameter update", lambda s: 1, from_upload=True
    ),
    "train_loss": Need("trained", "mean loss over all local batches and epochs", lambda s: 1),
    "rms_loss": Need("trained", "root mean squared example loss while training", lambda s: 1),
    "loss_after": Need(
        "trained", "mean loss of the trained model on local data", lambda s: 1, client_passes=1
    ),
    "delta_similarity": Need(
        "trained", "cosines between the updates of all clients [V, V]", uploads_model=True
    ),
    "proxy_predictions": Need(
        "trained",
        "class probabilities of the trained model on the proxy set [P * C], sent by the client",
        lambda s: s.proxy * s.classes,
        client_proxy_passes=1,
    ),
    "proxy_logits": Need(
        "trained",
        "logits of the uploaded model on the proxy set [P * C], computed by the server",
        server_passes_each=1,
    ),
    "loss": Need(
        "probe", "mean loss of the global model on local data", lambda s: 1, client_passes=1
    ),
    "gradient_distance": Need(
        "probe",
        "distance of the local gradient to the proxy gradient, summed over tensors",
        lambda s: 1,
        lambda s: s.state,
        client_passes=3,
        server_passes=3,
    ),
    "gradient_distance_l2": Need(
        "probe",
        "distance of the local gradient to the proxy gradient, as one vector",
        lambda s: 1,
        lambda s: s.state,
        client_passes=3,
        server_passes=3,
    ),
    "label_histogram": Need("probe", "local examples of each class [C]", oracle=True),
    "global_sketch": Need("server", "random projection of the global model's parameters [D]"),
    "proxy_histogram": Need(
        "server", "share of proxy examples the global model puts in each class [C]", server_passes=1
    ),
    "reward": Need(
        "server", "smoothed score of the new global model on the proxy set", server_passes=1
    ),
}


SERVER_REPORTS = frozenset(name for name, need in CATALOGUE.items() if need.phase == "server")
ORACLES = frozenset(name for name, need in CATALOGUE.items() if need.oracle)
PERMISSION = "allow_oracle"  # the option without which nothing of ORACLES is shown


def check_permission(reader: str, needs: frozenset[str], options: Mapping[str, Any]) -> None:
    """Raise UserError where something reads what no server may know, and is not allowed to.

    Args:
        reader: what reads, to begin the sentence with.
        needs: all that it reads.
        options: of the configuration, `options.*`.
    """
    private = sorted(needs & ORACLES)
    require(
        not private or options.get(PERMISSION) is True,
        f"{reader} reads {', '.join(private)} of the clients, which no server may know, so it is "
        f"only an upper reference: add options.{PERMISSION}=true to run it as one.",
        key=f"options.{PERMISSION}",
    )


def check(needs: frozenset[str]) -> None:
    """Raise UserError for a need that is not in the catalogue."""
    unknown = sorted(needs - CATALOGUE.keys())
    if unknown:
        raise UserError(
            f"A selector needs '{unknown[0]}', which is not a known report."
            f"{nearest(unknown[0], CATALOGUE)} Known: {', '.join(sorted(CATALOGUE))}."
        )


def trains_before_choice(needs: frozenset[str]) -> bool:
    """True where all visible clients must train before the selector can choose."""
    return any(CATALOGUE[name].phase == "trained" for name in needs)
