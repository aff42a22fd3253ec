"""A client that lies about its examples gets no more weight than the operator allows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from fake_grid import FakeNode
from flwr.app import Message
from run_folder_schema import check_run_folder
from small_federation import CLIENTS, TERMS, config, grid, serve

from fedglimpse.data.population import Population
from fedglimpse.data.sources import load
from fedglimpse.federation.models import digits_mlp
from fedglimpse.flower.claims import clipped, clipped_sizes
from fedglimpse.flower.client import client_app
from fedglimpse.flower.deployment import ServerTerms
from fedglimpse.runs.build import population_of
from mistakes import mistake

LIAR = 2
MANY = 12
HONEST_LIMIT = 0.02  # of final accuracy


def lying(node: FakeNode, claim: float) -> None:
    """Let a node say in every reply that it has so many examples."""
    answer = node.answer

    def lie(message: Message) -> Message:
        reply = answer(message)
        metrics = reply.content.metric_records.get("metrics")
        if metrics is not None and "num-examples" in metrics:
            metrics["num-examples"] = claim
        return reply

    node.answer = lie  # type: ignore[method-assign]


LONG_RUN = config("fedavg", rounds=40, selection__k=MANY, data__clients=MANY, data__partition="iid")


@cache
def parts() -> Population:
    return population_of(LONG_RUN, load("digits"), 0)


def part(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    rows = parts().rows[int(settings["partition-id"])]
    return parts().dataset.x_train[rows], parts().dataset.y_train[rows]


@cache
def accuracy(claim: float | None, terms: ServerTerms = TERMS) -> float:
    """Return the mean accuracy over the last five rounds; None: everybody is honest."""
    federation = grid(MANY, app=client_app(digits_mlp, data=part))
    if claim is not None:
        lying(federation.nodes[LIAR], claim)
    records = serve(federation, LONG_RUN, terms=terms).records
    return sum(record["accuracy"] for record in records[-5:]) / 5


@pytest.mark.parametrize("claim", [float(2**39), 1e6, float("inf"), -1.0])
def test_the_final_accuracy_is_that_of_an_honest_federation(claim: float) -> None:
    assert abs(accuracy(claim) - accuracy(None)) <= HONEST_LIMIT


def test_without_the_bounds_a_liar_has_the_round() -> None:
    unbounded = replace(TERMS, max_examples=2**40, max_share=1.0)
    assert accuracy(float(2**39), unbounded) < accuracy(None) - 2 * HONEST_LIMIT


def test_a_claim_beyond_the_bound_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = grid()
    lying(federation.nodes[LIAR], 2**39)
    with caplog.at_level(logging.WARNING, "flwr.fedglimpse"):
        serve(federation, config("fedavg", selection__k=CLIENTS), tmp_path / "o")
    for record in check_run_folder(tmp_path / "o"):
        (liar,) = record["rejected"]
        assert "terms.max_examples" in record["failed"][str(liar)]
        assert liar not in record["selected"]
        assert max(record["weights"]) < 0.5
    assert "max_examples" in caplog.text


def test_a_share_beyond_the_bound_is_clipped_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = grid()
    lying(federation.nodes[LIAR], 1_000_000)
    with caplog.at_level(logging.WARNING, "flwr.fedglimpse"):
        serve(federation, config("fedavg", selection__k=CLIENTS), tmp_path / "o")
    for record in check_run_folder(tmp_path / "o"):
        ((liar, reason),) = record["clipped"].items()
        assert "terms.max_share" in reason
        weights = dict(zip(record["selected"], record["weights"], strict=True))
        assert weights[int(liar)] == pytest.approx(0.5, abs=1e-3)
        assert sum(weights.values()) == pytest.approx(1.0)
    assert "clipped to 0.500" in caplog.text


@pytest.mark.parametrize("method", ["fedavg", "glimpse", "f3ast", "power-of-choice", "oort"])
def test_no_method_gives_a_liar_the_round(method: str) -> None:
    federation = grid()
    lying(federation.nodes[LIAR], 1_000_000)
    settings = config(method, selection__k=4)
    for record in serve(federation, settings).records:
        for client in record.get("clipped", {}):
            weights = dict(zip(record["selected"], record["weights"], strict=True))
            assert weights[int(client)] <= 0.5 + 1e-6


def test_honest_clients_are_left_alone() -> None:
    loose = replace(TERMS, max_share=1.0)
    settings = config("fedavg", selection__k=CLIENTS)
    strict_records = serve(grid(), settings).records
    loose_records = serve(grid(), settings, terms=loose).records
    assert all("clipped" not in record for record in strict_records)
    for one, other in zip(strict_records, loose_records, strict=True):
        assert one["weights"] == other["weights"]


@pytest.mark.parametrize(
    ("weights", "max_share", "expected"),
    [
        ([1.0, 1.0, 98.0], 0.5, [1.0, 1.0, 2.0]),
        ([1.0, 99.0], 0.5, [1.0, 99.0]),  # of two, one may have most
        ([1.0, 1.0, 50.0, 50.0], 0.3, [1.0, 1.0, 1.5, 1.5]),
        ([1.0, 2.0, 3.0], 0.1, [1.0, 1.0, 1.0]),  # less than an equal share
        ([1.0, 2.0, 3.0], 0.5, [1.0, 2.0, 3.0]),
        ([0.0, 0.0, 0.0], 0.5, [0.0, 0.0, 0.0]),
        ([0.0, 0.0, 5.0], 0.5, [5 / 3, 5 / 3, 5 / 3]),
        ([], 0.5, []),
    ],
)
def test_clipping(weights: list[float], max_share: float, expected: list[float]) -> None:
    assert clipped(torch.tensor(weights), max_share).tolist() == pytest.approx(expected)


def test_sizes_are_clipped_to_whole_numbers_and_nobody_to_none() -> None:
    assert clipped_sizes(torch.tensor([1, 1, 999_999]), 0.5).tolist() == [1, 1, 2]
    assert clipped_sizes(torch.tensor([45, 40, 50]), 0.5).tolist() == [45, 40, 50]
    assert clipped_sizes(torch.tensor([0, 3, 4, 5]), 0.5).tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize(("name", "value"), [("max_examples", 0), ("max_share", 0.0)])
def test_terms_that_no_federation_can_keep_are_refused(name: str, value: float) -> None:
    with mistake(f"terms.{name}"):
        ServerTerms(**{name: value})
