from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.methods import registry
from fedglimpse.studies.results.published import published_figure, read_paper

EXPERIMENTS = Path(__file__).parents[3] / "study" / "plans"
FILES = sorted(EXPERIMENTS.glob("paper_*.toml"))
TABLE = read_paper(EXPERIMENTS / "paper_table1.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_says_where_it_is_from(path: Path) -> None:
    paper = read_paper(path)
    assert paper["title"]
    assert paper["label"] in paper["source"]
    for claim in paper["claims"]:
        assert claim["id"]
        assert claim["text"]
        assert claim["source"]


def test_the_table_has_ten_settings_of_five_methods() -> None:
    assert len(TABLE["settings"]) == 10
    assert set(TABLE["settings"]) == set(TABLE["accuracy"])
    methods = {m for figures in TABLE["accuracy"].values() for m in figures}
    assert methods == {"fedprox", "ha-edgeflow", "fedawac", "f3ast", "glimpse"}
    assert methods <= set(registry.MODULES)
    assert all(len(figures) == 5 for figures in TABLE["accuracy"].values())


def test_the_table_agrees_with_what_the_paper_says_about_it() -> None:
    claimed = {c["text"].split()[0]: c["value"] for c in TABLE["claims"] if "value" in c}
    gains = {
        name: figures["glimpse"][0] - max(v[0] for m, v in figures.items() if m != "glimpse")
        for name, figures in TABLE["accuracy"].items()
    }
    won = [gain for gain in gains.values() if gain > 0]
    skewed = [gain for name, gain in gains.items() if "label-skew" in name]
    assert len(won) == claimed["glimpse"]
    assert sum(won) / len(won) == pytest.approx(claimed["on"], abs=0.05)
    assert sum(skewed) / len(skewed) == pytest.approx(claimed["first"], abs=0.05)
    assert -min(gains.values()) <= claimed["within"]


@pytest.mark.parametrize("name", TABLE["settings"])
def test_settings_are_matched_by_what_was_run(name: str) -> None:
    words: dict[str, Any] = {**TABLE["settings"][name]["match"], "method": "glimpse"}
    config = resolve({"preset": "paper", **words}).flat()
    found = published_figure(TABLE, config)
    assert found is not None
    assert found.figure.mean == pytest.approx(TABLE["accuracy"][name]["glimpse"][0] / 100)
    assert found.deviations == ()  # preset `paper` is what the text says
    other = published_figure(TABLE, {**config, "rounds": 30, "local.lr": 0.01})
    assert other is not None
    assert "local.lr 0.01 (paper: 0.001)" in other.deviations


def test_no_figure_for_what_the_paper_did_not_run() -> None:
    config = resolve({"data.name": "cifar10", "method": "mifa"}).flat()
    assert published_figure(TABLE, config) is None
    assert published_figure(TABLE, {**config, "method": "glimpse", "data.name": "digits"}) is None
    assert published_figure(None, config) is None


def test_mistakes_in_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_paper(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("x = ")
    with pytest.raises(UserError, match="not valid TOML"):
        read_paper(tmp_path / "bad.toml")
    (tmp_path / "other.toml").write_text("rounds = 3")
    with pytest.raises(UserError, match="no published figures"):
        read_paper(tmp_path / "other.toml")
    assert tomllib.loads(FILES[0].read_text())


GOOD = (
    'source = "S"\ntitle = "T"\nseeds = 5\n[settings.a]\nmatch = {"data.name" = "digits"}\n'
    "[accuracy.a]\nfedavg = [90.0, 1.0]\n"
)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD, 'source = "S"\ntitle = "T"\n', "holds no published figures"),
        ('source = "S"', "source = 3", "`source` = 3, which must be a text"),
        ('title = "T"\n', "", "must say its `title`"),
        ("seeds = 5\n", "", "`seeds` = None"),
        ("seeds = 5", 'seeds = "many"', "`seeds` = 'many'"),
        ("[settings.a]", "settings = 3\n[other]", "`settings` = 3, which must be a table"),
        ("match = ", "like = ", "`settings.a` without a table `match`"),
        ("[accuracy.a]", "[accuracy.b]", "no table `accuracy.a`"),
        ("[90.0, 1.0]", "90.0", "`accuracy.a.fedavg` = 90.0"),
        ("[90.0, 1.0]", "[90.0]", "`accuracy.a.fedavg` = "),
        ("[90.0, 1.0]", '["90", "1"]', "`accuracy.a.fedavg` = "),
        ("[settings.a]", "claims = [3]\n[settings.a]", "has a claim 3"),
        ("[settings.a]", 'claims = [{text = "x"}]\n[settings.a]', "`text` and `source`"),
        ("[settings.a]", "protocol_of = {fedavg = 3}\n[settings.a]", "`protocol_of.fedavg` = 3"),
    ],
)
def test_wrong_figures_are_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "paper.toml"
    path.write_text(GOOD)
    assert (
        published_figure(read_paper(path), {"data.name": "digits", "method": "fedavg"}) is not None
    )
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError) as caught:
        read_paper(path)
    assert words in str(caught.value)
    assert "paper.toml" in str(caught.value)
