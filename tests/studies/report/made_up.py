"""Run folders and studies with records that look like those of real runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedglimpse.config.loading import resolve
from fedglimpse.runs.summary import summarise
from fedglimpse.studies.results.study import CellResult, Partition, Study
from fedglimpse.studies.results.trace import trace_of
from fedglimpse.studies.statistics.condense import condense
from fedglimpse.studies.statistics.participation import Participation, classes_covered
from fedglimpse.version import DRAWS

CLASSES = 10


def records_of(
    seed: int,
    rounds: int,
    clients: int,
    top: float,
    *,
    pace: float = 0.02,
    thinking: bool = False,
    visible: int = 10,
) -> list[dict[str, Any]]:
    """Return records of a run that climbs towards `top`; `thinking` adds Q-values."""
    sees, picks = (np.random.Generator(np.random.PCG64([seed, i])) for i in (0, int(1e4 * top)))
    order = np.argsort(sees.random((rounds, clients)), axis=1)[:, :visible]  # [T, V]
    views = np.sort(order, axis=1)
    slots = np.argsort(picks.random((rounds, visible)), axis=1)[:, :5]  # [T, K]
    heights = top * (1 - np.exp(-pace * np.arange(rounds))) + picks.normal(0, 0.02, rounds)
    found = []
    for t, accuracy in enumerate(np.clip(heights, 0, 1).tolist()):
        ids, chosen = views[t].tolist(), views[t][slots[t]].tolist()
        record = {
            "lane": 0, "seed": seed, "round": t, "visible": ids, "selected": chosen,
            "rejected": [], "weights": [0.2] * 5, "accuracy": round(accuracy, 4),
            "macro_f1": round(accuracy, 4), "per_class_f1": [accuracy] * CLASSES, "loss": 1.0,
            "train_loss": 1.0, "reward": 0.5, "uplink_bytes": 2_000_000 + 40 * t,
            "downlink_bytes": 2_000_000, "client_flops": 9_000_000_000,
            "server_flops": 5_000_000, "seconds": 0.01,
        }  # fmt: skip
        if thinking:
            scores = picks.normal(5, 0.2, visible)
            past = picks.dirichlet(np.ones(6), visible)
            record |= {"q": scores.round(4).tolist(), "attention": past.round(3).tolist()}
            record |= {"behaviour": "greedy", "epsilon": 0.1}
        found.append(record)
    return found


def write_run(
    folder: Path, words: dict[str, Any], records: Sequence[dict[str, Any]], *, finish: bool = True
) -> None:
    """Write a run folder as the loop would."""
    folder.mkdir(parents=True)
    config = resolve(words)
    (folder / "config.toml").write_text(config.to_toml())
    (folder / "environment.json").write_text(
        json.dumps({"fedglimpse": "0.1.0", "torch": "2", "draws": DRAWS})
    )
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if finish:
        (folder / "summary.json").write_text(json.dumps(summarise(records, config.rounds)))


def plan(cells: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the content of a sweep.json."""
    head = {"format": 1, "version": "0.1.0", "title": "A sweep", "claim": "It works."}
    rest = {"control": None, "targets": {}, "paper": None, "cells": list(cells)}
    return {**head, **rest, **more}


def study_of(
    settings: dict[str, dict[str, Any]],
    variants: dict[str, float],
    seeds: Sequence[int],
    rounds: int,
    clients: int = 100,
    **more: Any,
) -> Study:
    """Return a study whose variants climb to the given accuracies."""
    counts = np.random.Generator(np.random.PCG64(1)).multinomial(60, [0.1] * 10, clients).tolist()
    cells = []
    for s, (setting, words) in enumerate(settings.items()):
        for variant, top in variants.items():
            flat = resolve({**words, "method": variant, "rounds": rounds}).flat()
            for seed in seeds:
                shift = 0.01 * np.sin(seed + s)
                think = variant == "glimpse"
                records = records_of(seed, rounds, clients, top + shift, thinking=think)
                cells.append(_cell((setting, variant, seed), flat, records, counts, seeds[0]))
    shares = [Partition(setting, seeds[0], counts) for setting in settings]
    rest = {"title": "A study", "claim": "A claim.", "control": None, "targets": {}, "paper": None}
    return Study(**{**rest, **more}, cells=cells, partitions=shares, source="made/up")


def _cell(
    name: tuple[str, str, int],
    flat: dict[str, Any],
    records: list[dict[str, Any]],
    counts: list[list[int]],
    first_seed: int,
) -> CellResult:
    setting, variant, seed = name
    clients, rounds = len(counts), len(records)
    seen, chosen = np.zeros(clients, int), np.zeros(clients, int)
    for record in records:
        seen[record["visible"]] += 1
        chosen[record["selected"]] += 1
    theory = {"gamma_squared": [1 / (t + 1) for t in range(rounds)], "bound": 3.25}
    return CellResult(
        id="-".join(map(str, name)),
        setting=setting,
        variant=variant,
        seed=seed,
        state="finished",
        config={**flat, "seeds": [seed]},
        facts=condense(records, rounds),
        participation=Participation(
            tuple(seen.tolist()),
            tuple(chosen.tolist()),
            classes_covered([r["selected"] for r in records], counts),
        ),
        trace=trace_of(records, clients) if seed == first_seed else None,
        theory=theory if variant == "glimpse" and seed == first_seed else None,
        environment={"fedglimpse": "0.1.0", "source": "0f1e", "draws": DRAWS},
    )


PAPER_SETTINGS = {
    f"{data}-{visibility}-{partition}": {
        "data.name": data, "visibility.kind": visibility, "data.partition": partition,
    }
    for data in ("cifar10", "fashion")
    for visibility in ("mobile", "random")
    for partition in ("dirichlet", "label_skew")
} | {
    f"har-{visibility}": {"data.name": "har", "visibility.kind": visibility}
    for visibility in ("mobile", "random")
}  # fmt: skip
PAPER_METHODS = {
    "fedprox": 0.71, "ha-edgeflow": 0.70, "fedawac": 0.74, "f3ast": 0.73, "glimpse": 0.76,
}  # fmt: skip
