"""Every method has a page that says what the code says."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe

PAGES = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize("name", registry.MODULES)
def test_a_page_has_its_command_and_confidence(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert f"fedglimpse run method={name} " in page
    assert f"[`{name}`]({name}.md)" in (PAGES / "README.md").read_text()
    if "Confidence" in page:
        assert f"Confidence: **{registry.info(name).confidence}**" in page


@pytest.mark.parametrize("name", registry.MODULES)
def test_a_page_lists_options_with_their_defaults(name: str) -> None:
    module = importlib.import_module(f"fedglimpse.methods.{registry.MODULES[name]}")
    page = (PAGES / f"{name}.md").read_text()
    listed = dict(re.findall(r"^\| `options\.(\w+)` \| (\S+) \|", page, re.MULTILINE))
    option_classes = [v for k, v in sorted(vars(module).items()) if k.endswith("Options")]
    options = (
        option_classes[0] if option_classes else None
    )  # "Options" comes first, before shared ones
    if options is None:
        assert not listed
        return
    defaults = {f.name: f.default for f in dataclasses.fields(options)}
    assert set(listed) <= set(defaults)
    if options.__module__ == module.__name__:  # else another page lists the shared ones
        assert set(options.__annotations__) <= set(listed)
    for option, text in listed.items():
        value = defaults[option]
        shown = str(value).lower() if isinstance(value, bool | str) else float(text)
        assert shown == (text if isinstance(value, bool | str) else float(value)), option


@pytest.mark.parametrize("name", registry.MODULES)
def test_the_index_agrees_with_the_declared_needs(name: str) -> None:
    index = (PAGES / "README.md").read_text().replace("\\|", "/")
    row = next(line for line in index.splitlines() if f"]({name}.md)" in line)
    phase, trains, _, confidence = (cell.strip() for cell in row.split("|")[3:7])
    description = describe(registry.info(name))
    assert (phase, confidence) == (description.phase, description.confidence)
    assert trains == ("K" if description.trains == "the chosen" else "/C/")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("fedavg", "K·d"),
        ("glimpse", "K·d + V·3"),
        ("herd", "K·d + V·D"),
        ("fedppo", "K·d + K·2"),
        ("fedabc", "K·d + V·P·C"),
    ],
)
def test_what_is_sent_is_told_of_the_defaults(name: str, sent: str) -> None:
    assert describe(registry.info(name)).uplink == sent
