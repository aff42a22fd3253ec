from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import PAPER_METHODS, PAPER_SETTINGS, study_of

from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.report.page import page
from fedglimpse.studies.results.published import read_paper
from fedglimpse.studies.results.study import Study

TABLE = read_paper(Path(__file__).parents[3] / "study" / "plans" / "paper_table1.toml")
VOID = {"meta", "link", "input", "br", "circle", "line"}


class Outline(HTMLParser):
    """Collects rows of tables and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.rows += tag == "tr"
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def study() -> Study:
    settings = {"digits <b>": {"data.name": "digits"}, "other": {"data.name": "synthetic"}}
    return study_of(settings, {"fedavg": 0.6, "glimpse": 0.7}, [0, 1, 2], 40, 20)


def payload_of(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="study">(.*?)</script>', html, re.S)
    assert found is not None
    return dict(json.loads(found.group(1)))


def test_the_page_is_whole_and_needs_no_network(study: Study) -> None:
    html = page(analyse(study))
    outline = Outline()
    outline.feed(html)
    assert outline.open == []
    assert all(a.startswith("#command-") for a in outline.addresses)
    assert "default-src 'none'" in html
    assert html.count("in about 50 % of studies with 2 pairs, 75 % of studies with 3 pairs") == 1
    assert html.count("ast 10 scored rounds") == html.count("fewer at the start") == 2
    assert outline.rows == (1 + 1) + 2 * (1 + 2) + (1 + 4)  # answer, results, participation


def test_names_cannot_break_the_page(study: Study) -> None:
    nasty = dataclasses.replace(study, title="</script><script>alert(1)</script>", claim="<i>x")
    html = page(analyse(nasty))
    assert "<script>alert(1)" not in html
    assert "<i>x" not in html
    assert "digits <b>" in payload_of(html)["settings"]  # type: ignore[operator]
    assert "digits <b>" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)


def test_every_row_has_the_command_that_repeats_it(study: Study) -> None:
    html = page(analyse(study))
    commands = re.findall(r"<pre><code>(fedglimpse run .*?)</code></pre>", html)
    assert len(commands) == 4
    assert "method=glimpse" in commands[1]
    assert "seeds=[0,1,2]" in commands[1]


def test_an_unfinished_study_says_so(study: Study) -> None:
    cells = [dataclasses.replace(study.cells[0], state="failed", reason="out of <memory>")]
    html = page(analyse(dataclasses.replace(study, cells=[*cells, *study.cells[1:]])))
    assert "1 of 12 runs have not finished" in html
    assert "out of &lt;memory&gt;" in html
    assert "2 of 3" in html


def test_one_method_alone_has_no_control(study: Study) -> None:
    alone = [c for c in study.cells if c.variant == "fedavg"]
    html = page(analyse(dataclasses.replace(study, cells=alone)))
    assert "Is any difference significant?" not in html
    assert "not significant" not in re.sub(
        r"<select.*?</select>|<dl>.*?</dl>", "", html, flags=re.S
    )


def test_curves_are_means_and_ranges_over_seeds(study: Study) -> None:
    results = analyse(study)
    curve = payload_of(page(results))["curves"]["other"][1]  # type: ignore[index]
    seeds = [c.facts for c in study.of("other", "glimpse")]
    last = [facts.curve.smooth[-1] for facts in seeds if facts is not None]
    mean, low, high = (row[-1] / 10_000 for row in curve["smooth"])
    assert mean == pytest.approx(sum(last) / 3, abs=1e-4)
    assert (low, high) == (pytest.approx(min(last), abs=1e-4), pytest.approx(max(last), abs=1e-4))
    assert curve["rounds"][-1] == 40


def test_a_study_of_250_runs_stays_under_five_megabytes() -> None:
    few = study_of(PAPER_SETTINGS, PAPER_METHODS, [0], 600, paper=TABLE)
    cells = [dataclasses.replace(c, seed=s, trace=c.trace if s == 0 else None)
             for c in few.cells for s in range(5)]  # fmt: skip
    results = analyse(dataclasses.replace(few, cells=cells))
    html = page(results)
    assert len(results.study.cells) == 250
    assert 500_000 < len(html.encode()) < 5_000_000
    assert html.count("ours − paper") >= 50


def test_theory_of_the_right_seed_is_drawn(study: Study) -> None:
    lane = {"seed": 0, "series": {"round": [0, 3], "gap": [0.5, float("inf")], "mu": [None, None]},
            "printed": {"total": 7.123456}, "q": None}  # fmt: skip
    theory = {"method": "x", "notes": ["A note."], "lanes": [{"seed": 1}, lane]}
    cells = [dataclasses.replace(c, theory=theory) for c in study.cells]
    runs = payload_of(page(analyse(dataclasses.replace(study, cells=cells))))["runs"]
    assert runs[0]["theory"] == {  # type: ignore[index]
        "rounds": [0, 3],
        "series": {"gap": [0.5, None]},
        "figures": {"printed.total": 7.1235},
        "notes": ["A note."],
    }
