"""The JSON Schema for editors says what `check` and the loader say of the same file."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from typer.testing import CliRunner

from fedglimpse.cli.main import app
from fedglimpse.config.loading import build, resolve
from fedglimpse.config.presets import DATASET_DEFAULTS, PRESETS
from fedglimpse.config.retired import KEYS
from fedglimpse.config.schema import Config, config_schema, flatten
from fedglimpse.errors import UserError
from fedglimpse.fields import check_fields

WRONG = [
    "rounds = 0",
    'rounds = "many"',
    "seeds = 3",
    'seeds = ["a"]',
    'preset = "papper"',
    "colour = 1",
    "[data]\nalpha = 0",
    "[data]\nalpha = true",
    "[data]\nclients = 2.5",
    '[data]\npartition = "dirichlett"',
    "[data]\ncolour = 1",
    "[local]\nmomentum = 1",
    '[engine]\nmax_jobs = "some"',
    "[engine]\nmax_jobs = 0",
    "[visibility]\np = 1.5",
    "[options.rate]\na = 1",
    '[log]\nwandb = "project"',
]
RIGHT = [
    "",
    "data.alpha = 3",
    '[data]\npartition = "my_split:neighbours"',
    '[engine]\nmax_jobs = "auto"',
    "[engine]\nmax_jobs = 4",
    'seeds = [0, 1]\n[options]\nmode = "x"\nrates = [1, 2.5]',
    '[log]\nwandb = ""',
]


def is_valid(values: dict[str, Any]) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    return bool(jsonschema.Draft7Validator(config_schema()).is_valid(values))


def loads(values: dict[str, Any]) -> bool:
    try:
        check_fields(build(flatten(values)))
    except UserError:
        return False
    return True


@pytest.mark.parametrize("text", WRONG)
def test_wrong_values_fail(text: str) -> None:
    values = tomllib.loads(text)
    assert not loads(values)
    assert not is_valid(values)


@pytest.mark.parametrize("text", RIGHT)
def test_right_values_pass(text: str) -> None:
    values = tomllib.loads(text)
    assert loads(values)
    assert is_valid(values)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dataset", DATASET_DEFAULTS)
def test_every_preset_passes(preset: str, dataset: str) -> None:
    config = resolve({"preset": preset, "data.name": dataset, "options.mode": "x"})
    assert is_valid(tomllib.loads(config.to_toml()))


def test_the_schema_is_one_itself() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(config_schema())


def test_every_setting_has_a_type_and_a_meaning() -> None:
    schema = json.loads(json.dumps(config_schema()))
    for key in Config().flat():
        entry = schema
        for name in key.split("."):
            entry = entry["properties"][name]
        assert {"type", "enum", "anyOf"} & set(entry), key
        assert entry["description"], key
    assert schema["properties"]["data"]["properties"]["alpha"]["exclusiveMinimum"] == 0
    assert schema["properties"]["local"]["properties"]["lr"]["type"] == "number"
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("key", KEYS)
def test_a_retired_setting_passes_at_its_default_alone(key: str) -> None:
    group, _, name = key.partition(".")
    assert is_valid({group: {name: KEYS[key].default}})
    assert not is_valid({group: {name: "other"}})


def test_the_command_prints_it() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == json.loads(json.dumps(config_schema()))
