"""What travels between server and clients: kinds of messages, records, versions.

A request carries one ConfigRecord `config` (flat, dotted keys) and one ArrayRecord `arrays`; a
reply carries `info` (words), `metrics` (numbers) and `arrays`. A model state travels as one flat
row of float32, see `federation/state.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedglimpse.config.schema import Config
from fedglimpse.federation.state import Layout
from fedglimpse.types import LocalObjective
from fedglimpse.version import VERSION

HELLO = "query.hello"  # who are you
PROBE = "query.probe"  # report at this model, without training
SKETCH = "train.sketch"  # train from this model, keep the result, send reports
UPLOAD = "query.upload"  # send the result of `SKETCH`
UPDATE = "train.update"  # train from this model and send the result at once

OK = "ok"
STALE = "stale"  # the update of that round is no longer there
VERSION_DIFFERS, MODEL_DIFFERS = "another version", "another model"
UNABLE = "unable"  # a report or an objective this client does not serve
FAILED = "failed"  # an exception on the client

Plain = str | int | float | bool


def series(version: str) -> str:
    """Return the part of a version that client and server must share: major.minor."""
    return ".".join(version.split(".")[:2])


def mismatch(who: str, theirs: str) -> str | None:
    """Return the sentence about another side with another version of this library, if it is so."""
    if series(theirs) == series(VERSION):
        return None
    return (
        f"{who} runs fedglimpse {theirs or 'of an unknown version'}, but here it is {VERSION}: "
        f"install the same {series(VERSION)}.* on server and clients."
    )


def fingerprint(layout: Layout) -> str:
    """Return a short name of a model's layout, the same wherever the same model is built."""
    text = ";".join(f"{e.name}{e.shape}" for e in layout.entries)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def settings_of(config: Config, objective: LocalObjective) -> dict[str, Plain]:
    """Return what clients must know of a run: how to train, how to sketch."""
    parts: dict[str, Any] = {"local": config.local, "sketch": config.sketch, "objective": objective}
    flat: dict[str, Plain] = {}
    for name, part in parts.items():
        flat |= {f"{name}.{k}": v for k, v in dataclasses.asdict(part).items()}
    return flat


def about(config: Config, objective: LocalObjective, classes: int) -> dict[str, Plain]:
    """Return the settings that are the same in all messages of a run but `query.upload`."""
    return {**settings_of(config, objective), "seed": config.seeds[0], "classes": classes}


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings `name.*` without their prefix."""
    return {k.removeprefix(f"{name}."): v for k, v in config.items() if k.startswith(f"{name}.")}


def names_in(config: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the names in a comma-separated setting."""
    return frozenset(n for n in str(config.get(key, "")).split(",") if n)


def joined(names: frozenset[str]) -> str:
    """Write names as a comma-separated setting."""
    return ",".join(sorted(names))


def packed(tensor: Tensor) -> Array:
    """Return a tensor as it travels."""
    return Array(tensor.detach().cpu().numpy())


def request(config: Mapping[str, Plain], arrays: Mapping[str, Array]) -> RecordDict:
    """Return what the server sends."""
    told = ConfigRecord({**config, "version": VERSION})
    return RecordDict({"config": told, "arrays": ArrayRecord(dict(arrays))})


def reply(
    status: str,
    info: Mapping[str, Plain] | None = None,
    metrics: Mapping[str, float] | None = None,
    arrays: Mapping[str, Array] | None = None,
) -> RecordDict:
    """Return what a client sends."""
    return RecordDict(
        {
            "info": ConfigRecord({"status": status, "version": VERSION, **(info or {})}),
            "metrics": MetricRecord(dict(metrics or {})),
            "arrays": ArrayRecord(dict(arrays or {})),
        }
    )


def size_of(content: RecordDict) -> int:
    """Return the bytes of all records as they travel, without Flower's envelope."""
    arrays = sum(len(a.data) for r in content.array_records.values() for a in r.values())
    return arrays + sum(len(record.deflate()) for record in content.values())
