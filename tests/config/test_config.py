from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fedglimpse.config import loading as config
from fedglimpse.config.checks import check
from fedglimpse.config.presets import PRESETS
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.fields import setting
from mistakes import mistake


def test_words_override_the_file_and_the_file_overrides_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('preset = "paper"\nrounds = 7\n[local]\nlr = 0.5\nbatch_size = 8\n')
    loaded = config.load(file, ["local.lr=0.25"])
    assert (loaded.rounds, loaded.local.lr, loaded.local.batch_size) == (7, 0.25, 8)
    assert loaded.aggregate.source == "smoothed"  # from the preset


def test_dataset_defaults_yield_to_the_preset() -> None:
    assert config.resolve({"data.name": "digits"}).local.batch_size == 16
    assert config.resolve({"data.name": "digits", "preset": "paper"}).local.batch_size == 64
    assert config.resolve({"data.name": "hapt"}).data.partition == "subject"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_written_configuration_reads_back_the_same(preset: str, tmp_path: Path) -> None:
    words = [f"preset={preset}", "data.name=fashion", "seeds=[3,4]", "options.mode=x"]
    loaded = config.load(None, words)
    (tmp_path / "c.toml").write_text(loaded.to_toml())
    assert config.build(config.read_toml(tmp_path / "c.toml")) == loaded


def test_the_agent_of_the_study_is_that_of_the_defaults() -> None:
    study = config.resolve({"preset": "tuned-1", "data.name": "own:x"})
    assert study.flat() == {**Config().flat(), "data.name": "own:x"}
    assert config.resolve({}).preset == "tuned"


def test_an_older_name_of_the_tuned_agent_still_works() -> None:
    assert config.resolve({"preset": "taught"}).agent == config.resolve({}).agent


def test_presets_differ_as_the_specification_says() -> None:
    paper, released, tuned = (config.resolve({"preset": p}) for p in ("paper", "released", "tuned"))
    assert (paper.local.optimizer, paper.local.lr, paper.local.batch_size) == ("sgd", 1e-3, 64)
    assert (released.local.optimizer, released.local.lr) == ("adam", 1e-3)
    assert released.local.batch_size == 256
    assert (paper.aggregate.window, paper.aggregate.source) == (5, "smoothed")
    assert (released.aggregate.window, released.aggregate.source) == (6, "raw")
    assert (tuned.aggregate.window, tuned.aggregate.source) == (6, "raw")
    assert (released.data.proxy_source, paper.data.proxy_source) == ("leaky_train", "heldout")
    assert (released.data.equal_size, released.data.exact_classes) == (False, False)
    assert (paper.data.equal_size, paper.data.exact_classes) == (True, True)
    assert (released.visibility.min_visible, paper.visibility.min_visible) == (2, 1)
    assert (released.local.proximal_squared, released.local.proximal_mu) == (False, 5e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("selection.kk", "3"),
        ("rounds", "many"),
        ("rounds", "2.5"),
        ("local.lr", "true"),
        ("seeds", "3"),
        ("seeds", '["a"]'),
        ("preset", "papper"),
        ("options.a b", "3"),
    ],
)
def test_unreadable_overrides(key: str, value: str) -> None:
    with mistake(key):
        config.load(None, [f"{key}={value}"])


@pytest.mark.parametrize("word", ["rounds", "=3"])
def test_overrides_have_the_form_key_equals_value(word: str) -> None:
    with mistake():
        config.load(None, [word])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("selection.k", "0"),
        ("selection.k", "41"),
        ("visibility.cluster_size", "41"),
        ("visibility.min_visible", "11"),
        ("visibility.trace", "sessions.csv"),
        ("data.alpha", "0"),
        ("data.alpha", "-1.5"),
        ("visibility.p", "0"),
        ("visibility.p", "1.2"),
        ("local.lr", "0"),
        ("local.lr", "nan"),
        ("local.lr", "inf"),
        ("agent.lr", "nan"),
        ("agent.weight_decay", "inf"),
        ("seeds", "[]"),
        ("seeds", "[1,1]"),
        ("visibility.kind", "mobil"),
        ("local.optimizer", "adm"),
        ("data.clients", "0"),
        ("rounds", "0"),
        ("local.momentum", "1"),
        ("engine.max_jobs", "0"),
        ("engine.max_jobs", "some"),
    ],
)
def test_impossible_values_name_the_key(key: str, value: str) -> None:
    with mistake(key):
        check(config.load(None, [f"{key}={value}"]))


def test_the_defaults_are_possible() -> None:
    check(Config())
    for preset in PRESETS:
        for name in ("digits", "fashion", "cifar10", "har", "hapt", "synthetic"):
            check(config.resolve({"preset": preset, "data.name": name}))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder, other = tmp_path / "dir.toml", tmp_path / "other.toml"
    folder.mkdir()
    with pytest.raises(UserError, match=r"dir\.toml is a folder"):
        config.load(folder)
    other.write_bytes('method = "fedavg" # für'.encode("latin-1"))
    with pytest.raises(UserError, match=r"other\.toml is not UTF-8"):
        config.load(other)


def test_a_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"a\.toml cannot be read \(Permission denied\)"):
        config.load(tmp_path / "a.toml")


@dataclass(frozen=True)
class Fields:
    mode: Literal["a", "b"] = "a"
    sizes: list[int] = field(default_factory=list)
    anything: Any = None
    odd: complex = 1j


@pytest.mark.parametrize(
    ("name", "value"), [("mode", "b"), ("sizes", [1, 2]), ("anything", "x"), ("anything", [1])]
)
def test_options_may_be_words_of_a_list_lists_or_anything(name: str, value: Any) -> None:
    options = config.options_of(Fields, config.resolve({f"options.{name}": value}))
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("name", "value"), [("mode", "c"), ("sizes", 3), ("sizes", [1.5]), ("odd", 1)]
)
def test_other_options_are_refused(name: str, value: Any) -> None:
    with mistake(f"options.{name}"):
        config.options_of(Fields, config.resolve({f"options.{name}": value}))


def test_options_of_a_method_may_have_ranges() -> None:
    @dataclass(frozen=True)
    class Ranged:
        rate: float = setting(0.5, "a share", above=0, at_most=1)

    assert config.options_of(Ranged, config.resolve({"options.rate": 1})).rate == 1.0
    with mistake("options.rate"):
        config.options_of(Ranged, config.resolve({"options.rate": 0}))


def test_more_clients_than_can_be_numbered_are_refused() -> None:
    with mistake("data.clients"):
        check(config.resolve({"data.clients": 2**63}))
