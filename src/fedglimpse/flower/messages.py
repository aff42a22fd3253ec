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
STALE = "stale"  # the client no longer holds the update of that round
VERSION_DIFFERS = "another version"
MODEL_DIFFERS = "another model"
UNABLE = "unable"  # a report or an objective this client does not serve
FAILED = "failed"  # an exception on the client

Plain = str | int | float | bool


def series(version: str) -> str:
    """Return the part of a version that client and server must share: major.minor."""
    return ".".join(version.split(".")[:2])


def version_mismatch(subject: str, version: str) -> str | None:
    """Return a sentence where `subject` runs a `version` that does not fit ours, else None."""
    if series(version) == series(VERSION):
        return None
    return (
        f"{subject} runs fedglimpse {version or 'of an unknown version'}, but here it is "
        f"{VERSION}: install the same {series(VERSION)}.* on server and clients."
    )


def fingerprint(layout: Layout) -> str:
    """Return a short name of a model's layout, the same wherever the same model is built."""
    text = ";".join(f"{entry.name}{entry.shape}" for entry in layout.entries)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def run_settings(config: Config, objective: LocalObjective, classes: int) -> dict[str, Plain]:
    """Return the settings that are the same in all messages of a run but `query.upload`."""
    sections: dict[str, Any] = {
        "local": config.local,
        "sketch": config.sketch,
        "objective": objective,
    }
    settings: dict[str, Plain] = {}
    for name, values in sections.items():
        for key, value in dataclasses.asdict(values).items():
            settings[f"{name}.{key}"] = value
    settings["seed"] = config.seeds[0]
    settings["classes"] = classes
    return settings


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings `name.*` without their prefix."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)}


def names_in(config: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the names in a comma-separated setting."""
    return frozenset(name for name in str(config.get(key, "")).split(",") if name)


def joined(names: frozenset[str]) -> str:
    """Write names as a comma-separated setting."""
    return ",".join(sorted(names))


def packed(tensor: Tensor) -> Array:
    """Return a tensor as it travels."""
    return Array(tensor.detach().cpu().numpy())


def request(config: Mapping[str, Plain], arrays: Mapping[str, Array]) -> RecordDict:
    """Return what the server sends."""
    return RecordDict(
        {
            "config": ConfigRecord({**config, "version": VERSION}),
            "arrays": ArrayRecord(dict(arrays)),
        }
    )


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
    size = 0
    for arrays in content.array_records.values():
        for array in arrays.values():
            size += len(array.data)
    for record in content.values():
        size += len(record.deflate())
    return size
