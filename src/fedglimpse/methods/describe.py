"""A method in a line: when clients train and what travels, read off what it declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fedglimpse.config.loading import resolve
from fedglimpse.federation.reports import CATALOGUE, ORACLES, Sizes, trains_before_choice
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.registry import reads


@dataclass(frozen=True)
class Description:
    """What `fedglimpse methods` shows."""

    name: str
    summary: str
    source: str
    confidence: str
    phase: str  # pre: chosen before training; post: after
    trains: str
    uplink: str
    needs: tuple[str, ...]
    oracle: bool  # reads what no server may know: an upper reference


def describe(info: MethodInfo) -> Description:
    """Build the method for a small population and read what it asks for."""
    setting = Setting(
        config=replace(resolve({}), method=info.name, options=info.example_options),
        seed=0,
        sizes=torch.full((10,), 10),
        num_classes=10,
        num_params=100,
    )
    method = info.build(setting)
    asked = method.selector.needs
    after = (method.selector.learns_from | method.aggregator.needs) - asked
    after = frozenset(name for name in after if not CATALOGUE[name].from_upload)
    post = trains_before_choice(asked)
    everything = method.takes_all or any(CATALOGUE[n].uploads_model for n in asked)
    sent = ["V·d" if everything else "K·d"]
    sent += [f"V·{floats}" for floats in _floats(asked)]
    sent += [f"K·{floats}" for floats in _floats(after)]
    return Description(
        name=info.name,
        summary=info.summary,
        source=info.source,
        confidence=info.confidence,
        phase="post" if post else "pre",
        trains=_trains(post, method.takes_all),
        uplink=" + ".join(sent),
        needs=tuple(sorted(asked)),
        oracle=not ORACLES.isdisjoint(reads(method)),
    )


def _trains(post: bool, takes_all: bool) -> str:
    if takes_all:
        return "all visible"
    return "all visible, then chooses" if post else "the chosen"


def _floats(names: Iterable[str]) -> list[str]:
    """Return how many floats a client sends, as a letter where that depends on a size."""
    letters = {0: "", 1: "1", 7: "D", 11 * 13: "P·C"}
    sizes = Sizes(state=5, sketch=7, proxy=11, classes=13)
    found = Counter(letters[CATALOGUE[name].up(sizes)] for name in sorted(names))
    single = found.pop("1", 0)
    return ([str(single)] if single else []) + [size for size in found.elements() if size]
