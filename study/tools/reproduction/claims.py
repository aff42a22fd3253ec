"""Every claim, what was measured, and a verdict by a rule.

A rule is a function; the second paragraph of its docstring is the rule in one sentence, and that
is what the page shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reproduction import rules_ablations as ablations
from reproduction import rules_accuracy as accuracy
from reproduction import rules_efficiency as efficiency
from reproduction import rules_own as own
from reproduction.evidence import Evidence
from reproduction.markdown import paragraphs, table
from reproduction.shelf import Shelf
from reproduction.verdict import Finding, Verdict

Rule = Callable[[Evidence], Finding]

STUDY_OF = {  # file of claims -> the study that holds their runs
    "paper_table1": "table1",
    "paper_fig3_curves": "table1",
    "paper_fig4_final": "table1",
    "paper_fig5_efficiency": "table1",
    "paper_fig6_history": "fig6_history",
    "paper_fig7_selection": "fig7_selection",
    "paper_fig8_identity": "fig8_identity",
}
RULES: dict[str, Rule] = {  # id of a claim in these files -> its rule
    "first-in-most": accuracy.first_in_most,
    "margin-where-first": accuracy.margin_where_first,
    "first-under-label-skew": accuracy.first_under_label_skew,
    "close-elsewhere": accuracy.close_elsewhere,
    "steadier-over-seeds": accuracy.steadier_over_seeds,
    "alike-in-both-visibilities": accuracy.alike_in_both_visibilities,
    "faster-and-higher-under-label-skew": efficiency.faster_and_higher_under_label_skew,
    "larger-gain-when-mobile": accuracy.larger_gain_when_mobile,
    "higher-and-steadier-under-label-skew": accuracy.higher_and_steadier_under_label_skew,
    "competitive-and-steadier-under-dirichlet": accuracy.competitive_and_steadier_under_dirichlet,
    "all-above-level-on-activities": accuracy.all_above_level_on_activities,
    "steadier-on-activities": accuracy.steadier_on_activities,
    "larger-gain-where-baselines-are-low": accuracy.larger_gain_where_baselines_are_low,
    "saves-uplink-under-dirichlet": efficiency.saves_uplink_under_dirichlet,
    "saves-uplink-under-label-skew": efficiency.saves_uplink_under_label_skew,
    "saves-server-flops-under-dirichlet": efficiency.saves_server_flops_under_dirichlet,
    "saves-server-flops-under-label-skew": efficiency.saves_server_flops_under_label_skew,
    "shortest-context-is-worst": ablations.shortest_context_is_worst,
    "longer-context-helps": ablations.longer_context_helps,
    "context-saturates": ablations.context_saturates,
    "more-visible-clients-help": ablations.more_visible_clients_help,
    "larger-share-helps": ablations.larger_share_helps,
    "gains-look-alike": ablations.gains_look_alike,
    "consistent-over-visibility": ablations.consistent_over_visibility,
    "identity-helps-throughout": ablations.identity_helps_throughout,
    "identity-steadies-under-dirichlet": ablations.identity_steadies_under_dirichlet,
}
OWN_RULES: dict[str, Rule] = {  # study -> the rule of its file's own claim
    "recipe_study": own.recipe_matters_more,
    "recipe_adam": own.adam_explains_the_figures,
    "presets": own.presets_reach_the_paper,
    "components": own.every_component_adds,
    "agent_study": own.turns_make_up_for_the_harm,
    "history_study": own.changes_raise_accuracy,
    "lean_study": own.leaning_beats_chance,
    "proof_study": own.proof_mends_the_harm,
    "proof": own.proof_mends_the_harm,
    "taught_study": own.teaching_pays,
    "taught": own.policy_travels,
    "averaged_digits": own.choosing_is_worth_little,
    "averaged": own.choosing_is_worth_little,
    "adam_study": own.agent_beats_chance,
}


@dataclass(frozen=True)
class Claim:
    """One sentence, where it stands, and how it is judged."""

    text: str
    where: str
    study: str
    rule: Rule
    value: float | None = None

    def judged(self, shelf: Shelf) -> Finding:
        """Apply the rule to what is stored."""
        study = shelf.study(self.study).study
        return self.rule(Evidence(study, shelf.paper("paper_table1"), self.value))


def paper_claims(shelf: Shelf) -> Iterator[Claim]:
    """Return the paper's sentences, in the order of its figures."""
    for file, study in STUDY_OF.items():
        for claim in shelf.paper(file)["claims"]:
            note = f" ({claim['note']})" if "note" in claim else ""
            rule = RULES[claim["id"]]
            yield Claim(claim["text"] + note, claim["source"], study, rule, claim.get("value"))


def own_claims(shelf: Shelf) -> Iterator[Claim]:
    """Return what our own files set out to test."""
    for name, rule in OWN_RULES.items():
        yield Claim(shelf.study(name).study.claim, f"`plans/{name}.toml`", name, rule)


def all_claims(shelf: Shelf) -> list[Claim]:
    """Return every claim, in the order of their numbers on the page."""
    return [*paper_claims(shelf), *own_claims(shelf)]


def rule_text(rule: Rule) -> str:
    """Return a rule's sentence."""
    _, sentence = (inspect.getdoc(rule) or "").split("\n\n")
    return " ".join(sentence.split())


def claims_table(shelf: Shelf) -> str:
    """Return every claim with its verdict, and how many have which verdict."""
    claims = all_claims(shelf)
    verdicts: list[Verdict] = []
    lines: list[list[str]] = []
    for number, claim in enumerate(claims, 1):
        finding = claim.judged(shelf)
        verdicts.append(finding.verdict)
        verdict = f"**{finding.verdict.value}**"
        lines.append([str(number), claim.text, claim.where, finding.measured, verdict])
    counts = "; ".join(f"{verdict.value}: {verdicts.count(verdict)}" for verdict in Verdict)
    num_paper = len(list(paper_claims(shelf)))
    columns = ["where", "we measured", "verdict"]
    return paragraphs(
        [
            f"{len(claims)} claims. {counts}.",
            table(["", "the paper says", *columns], lines[:num_paper]),
            table(["", "our files say", *columns], lines[num_paper:]),
        ]
    )


def rules_list(shelf: Shelf) -> str:
    """Return the rule of every claim, in one sentence each."""
    claims = all_claims(shelf)
    return "\n".join(f"{i}. {rule_text(claim.rule)}" for i, claim in enumerate(claims, 1))
