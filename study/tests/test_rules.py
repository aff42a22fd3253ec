"""Every claim's verdict where the claim clearly holds, clearly fails, is open, or is not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from fedglimpse.studies.results.study import CellResult, CellState, Study
from fedglimpse.studies.statistics.condense import Facts
from played import PLANS, Came, World, jitter, played
from reproduction.claims import OWN_RULES, RULES, Claim, all_claims, rule_text
from reproduction.evidence import Evidence, over_strongest
from reproduction.pooling import Pooled
from reproduction.verdict import Verdict, all_of, any_of, at_least, points, reaches
from worlds import OPEN, TABLE, WORLDS, noise, table_fails, table_holds

CLAIMS = all_claims(PLANS)


@cache
def study_in(name: str, world: World) -> Study:
    return played(name, world)


def verdict(claim: Claim, world: World) -> Verdict:
    found = claim.rule(Evidence(study_in(claim.study, world), TABLE, claim.value))
    assert found.measured
    return found.verdict


def name_of(claim: Claim) -> str:
    return claim.rule.__name__


def named(rule: str) -> Claim:
    return next(claim for claim in CLAIMS if name_of(claim) == rule)


@pytest.mark.parametrize("claim", CLAIMS, ids=name_of)
def test_a_clear_effect_holds(claim: Claim) -> None:
    assert verdict(claim, WORLDS[claim.study][0]) is Verdict.HOLDS


@pytest.mark.parametrize("claim", CLAIMS, ids=name_of)
def test_a_clear_effect_the_other_way_fails(claim: Claim) -> None:
    assert verdict(claim, WORLDS[claim.study][1]) is Verdict.FAILS


@pytest.mark.parametrize("claim", CLAIMS, ids=name_of)
def test_seeds_that_disagree_tell_nothing(claim: Claim) -> None:
    assert verdict(claim, OPEN.get(claim.study, noise)) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("claim", CLAIMS, ids=name_of)
def test_nothing_run_is_not_run_yet(claim: Claim) -> None:
    assert verdict(claim, lambda cell, config: None) is Verdict.NOT_RUN


def without_cifar(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
    return None if config["data.name"] == "cifar10" else table_holds(cell, config)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.study == "table1"], ids=name_of)
def test_missing_settings_leave_open_what_needs_them(claim: Claim) -> None:
    elsewhere = "activities" in name_of(claim) or name_of(claim) == "close_elsewhere"
    expected = Verdict.HOLDS if elsewhere else Verdict.NOT_RUN
    assert verdict(claim, without_cifar) is expected


def lost_without_cifar(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
    return None if config["data.name"] == "cifar10" else table_fails(cell, config)


def test_one_setting_may_settle_what_must_hold_in_all() -> None:
    assert verdict(named("first_under_label_skew"), lost_without_cifar) is Verdict.FAILS
    assert verdict(named("first_in_most"), lost_without_cifar) is Verdict.FAILS  # 6 of 10 are lost


def one_baseline_missing(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
    return None if cell.variant == "f3ast" else table_holds(cell, config)


def test_the_strongest_baseline_is_not_known_until_all_are_run() -> None:
    for rule in ("first_in_most", "margin_where_first", "steadier_over_seeds"):
        assert verdict(named(rule), one_baseline_missing) is Verdict.NOT_RUN


def one_seed_of_cifar(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
    """A gain of ten points on CIFAR-10, where one seed is there, and of none elsewhere."""
    far = config["data.name"] == "cifar10"
    if far and cell.seed:
        return None
    return Came(0.5 + 0.1 * (far and cell.variant == "glimpse") + jitter(cell, 0.0005))


def test_settings_count_alike_whichever_was_run_further() -> None:
    evidence = Evidence(study_in("table1", one_seed_of_cifar), TABLE)
    found = over_strongest(evidence, evidence.where(partition="label_skew"))
    assert found is not None
    assert found.seeds == {"cifar10": 1, "fashion": 5}
    assert found.mean == pytest.approx(0.05, abs=0.002)
    assert found.with_more_seeds is not None
    assert found.with_more_seeds.mean == pytest.approx(0.0, abs=0.002)
    assert "cifar10 1 seed, fashion 5 seeds), fashion alone" in points(found)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.study == "table1"], ids=name_of)
def test_data_with_one_seed_carry_no_verdict(claim: Claim) -> None:
    """Where seeds of other data decide alone, or one setting settles it, that is said."""

    def world(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
        return None if config["data.name"] != "hapt" and cell.seed else table_holds(cell, config)

    elsewhere = "activities" in name_of(claim)
    spread = name_of(claim) == "steadier_over_seeds"  # of one seed there is none
    expected = Verdict.HOLDS if elsewhere else Verdict.NOT_RUN if spread else Verdict.INCONCLUSIVE
    assert verdict(claim, world) is expected


def test_few_seeds_do_not_carry_a_size_that_their_interval_does_not_reach() -> None:
    def gap(mean: float, half: float, p: float) -> Pooled:
        return Pooled(mean, mean - half, mean + half, p, 4, 1, {"digits": 4})

    gain, short, enough = gap(0.2, 0.08, 0.001), gap(-0.1, 0.08, 0.06), gap(-0.1, 0.12, 0.1)
    assert reaches(gain, short) is Verdict.INCONCLUSIVE
    assert reaches(gain, enough) is Verdict.HOLDS
    assert reaches(gap(0.2, 0.3, 0.2), enough) is Verdict.INCONCLUSIVE
    assert reaches(gain, gap(-0.1, 0.08, 0.01)) is Verdict.FAILS


def smaller_gain(cell: CellResult, config: Mapping[str, Any]) -> Came:
    return Came(0.5 + 0.02 * (cell.variant == "glimpse") + jitter(cell, 0.002))


def test_a_real_gain_smaller_than_published_does_not_hold() -> None:
    assert verdict(named("first_in_most"), smaller_gain) is Verdict.HOLDS
    assert verdict(named("margin_where_first"), smaller_gain) is Verdict.FAILS
    assert verdict(named("first_under_label_skew"), smaller_gain) is Verdict.FAILS


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (True, False, Verdict.HOLDS),  # "saves at least" is enough
        (False, True, Verdict.FAILS),  # "saves at most" too little
        (False, False, Verdict.INCONCLUSIVE),
    ],
)
def test_misses_bound_a_saving(ours: bool, theirs: bool, expected: Verdict) -> None:
    def world(cell: CellResult, config: Mapping[str, Any]) -> Came:
        mine = cell.variant == "glimpse"
        rounds = (20 if mine and ours else 500) + cell.seed
        return Came(0.5, rounds=rounds, reached=ours if mine else theirs)

    assert verdict(named("saves_uplink_under_label_skew"), world) is expected


def test_a_bound_does_not_carry_the_other_verdict() -> None:
    def world(cell: CellResult, config: Mapping[str, Any]) -> Came:  # theirs missed: at least 17 %
        mine = cell.variant == "glimpse"
        return Came(0.5, rounds=500, reached=mine)

    assert verdict(named("saves_uplink_under_label_skew"), world) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("state", "expected"), [("failed", Verdict.FAILS), ("unfinished", Verdict.NOT_RUN)]
)
def test_a_failed_run_is_a_miss_an_unfinished_one_is_not_there(
    state: CellState, expected: Verdict
) -> None:
    claim, study = named("saves_uplink_under_label_skew"), study_in("table1", table_fails)
    cells = [
        dataclasses.replace(c, state=state, facts=_missed(c)) if c.variant == "glimpse" else c
        for c in study.cells
    ]
    changed = Evidence(dataclasses.replace(study, cells=cells), TABLE, claim.value)
    assert claim.rule(changed).verdict is expected


def _missed(cell: CellResult) -> Facts | None:
    """Return what a run recorded that ended before it got to its target."""
    facts = cell.facts
    assert facts is not None
    climb = dataclasses.replace(facts.climb, heights=(0.0,))
    return dataclasses.replace(facts, accuracy=None, climb=climb)


def test_every_claim_has_its_rule_and_every_rule_its_claim() -> None:
    assert {claim.rule for claim in CLAIMS} == {*RULES.values(), *OWN_RULES.values()}
    assert len(CLAIMS) == len(RULES) + len(OWN_RULES)
    assert {claim.study for claim in CLAIMS} == set(WORLDS)


@pytest.mark.parametrize("claim", CLAIMS, ids=name_of)
def test_every_rule_is_one_sentence(claim: Claim) -> None:
    sentence = rule_text(claim.rule)
    assert sentence.startswith("Holds if")
    assert "does not hold if" in sentence
    assert "otherwise inconclusive" in sentence
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")


def test_joining_parts() -> None:
    yes, no, open_, missing = Verdict.HOLDS, Verdict.FAILS, Verdict.INCONCLUSIVE, Verdict.NOT_RUN
    assert all_of([yes, open_, missing, no]) is no
    assert all_of([yes, open_, missing]) is missing
    assert all_of([yes, open_]) is open_
    assert all_of([]) is missing
    assert any_of([no, open_, missing, yes]) is yes
    assert any_of([no, open_, missing]) is missing
    assert any_of([no, open_]) is open_
    assert any_of([no]) is no
    assert any_of([]) is missing
    assert at_least(2, [yes, yes, missing]) is yes
    assert at_least(2, [yes, no, missing]) is missing
    assert at_least(2, [yes, no, open_]) is open_
    assert at_least(2, [yes, no, no]) is no
