"""The description of a method, read from what it declares.

`python tools/update_docs.py` stores those of all methods for `descriptions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedglimpse.config.loading import resolve
from fedglimpse.federation.reports import CATALOGUE, ORACLES, Sizes, trains_before_choice
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.build import reads
from fedglimpse.methods.descriptions import Description
from fedglimpse.types import Method


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
    needs = method.selector.needs
    return Description(
        name=info.name,
        summary=info.summary,
        source=info.source,
        confidence=info.confidence,
        phase="post" if trains_before_choice(needs) else "pre",
        trains=_trains(method),
        uplink=_uplink(method),
        needs=tuple(sorted(needs)),
        oracle=not ORACLES.isdisjoint(reads(method)),
    )


def _trains(method: Method) -> str:
    """Return who trains in a round."""
    if method.takes_all:
        return "all visible"
    if trains_before_choice(method.selector.needs):
        return "all visible, then chooses"
    return "the chosen"


def _uplink(method: Method) -> str:
    """Return what clients send in a round, in floats: V visible, K chosen, d of a model."""
    before = method.selector.needs
    after = (method.selector.learns_from | method.aggregator.needs) - before
    sent_after = [name for name in after if not CATALOGUE[name].from_upload]
    all_upload = method.takes_all or any(CATALOGUE[name].uploads_model for name in before)
    terms = ["V·d" if all_upload else "K·d"]
    terms += [f"V·{floats}" for floats in _floats(before)]
    terms += [f"K·{floats}" for floats in _floats(sent_after)]
    return " + ".join(terms)


def _floats(names: Iterable[str]) -> list[str]:
    """Return how many floats a client sends: their number, then the letters of sizes."""
    sizes = Sizes(state=5, sketch=7, proxy=11, classes=13)  # told apart by their values
    letters = {7: "D", 11 * 13: "P·C"}
    single_floats = 0
    terms: list[str] = []
    for name in sorted(names):
        floats = CATALOGUE[name].up(sizes)
        if floats in letters:
            terms.append(letters[floats])
        else:
            single_floats += floats
    return [str(single_floats), *terms] if single_floats else terms
