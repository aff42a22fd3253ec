from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

from fedglimpse.errors import UserError
from fedglimpse.plugins import ImportedOnUse, load_callable, users_fault

OWN = """import json
from fedglimpse.config.loading import load

def build(setting):
    return setting

def none():
    return 1

def breaks(setting):
    return json.loads("{")

def ours(setting):
    return load(3)

def refuses(setting):
    from fedglimpse.errors import UserError
    raise UserError("as it is")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("own_code", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_code.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build(:\n", r"SyntaxError: .* \(own_broken.py:1\)"),
        ("x = 1\ny = 1 / 0\n", r"ZeroDivisionError: division by zero \(own_broken.py:2\)"),
        (
            "import no_such_package\n",
            r"ModuleNotFoundError: No module named 'no_such_package' \(own_broken.py:1\)",
        ),
        ("from fedglimpse import Chioce\n", r"ImportError: .* \(own_broken.py:1\)"),
        ("raise ValueError\n", r"ValueError \(own_broken.py:1\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(own_broken.py:2\)"),
    ],
)
def test_code_that_cannot_be_imported_is_one_sentence(folder: Path, text: str, words: str) -> None:
    (folder / "own_broken.py").write_text(text)
    with pytest.raises(UserError, match=f"method=own_broken:build cannot be imported: {words}"):
        load_callable("own_broken:build", "method")


@pytest.mark.parametrize("name", ["..x:y", ".:y", ":y", "no_such.module:y"])
def test_names_that_are_no_modules(name: str) -> None:
    with pytest.raises(UserError, match=r"cannot be imported .*run from the folder"):
        load_callable(name, "method")


def test_wrong_arguments_are_one_sentence(folder: Path) -> None:
    assert load_callable("own_code:build", "method")(3) == 3
    with pytest.raises(UserError, match=r"method=own_code:none takes \(\), but is called with int"):
        load_callable("own_code:none", "method")(3)


def test_errors_of_users_code_have_their_place(folder: Path) -> None:
    with pytest.raises(UserError, match=r"JSONDecodeError: .*\(own_code.py:11\); fix it") as caught:
        load_callable("own_code:breaks", "method")(3)
    assert caught.value.__cause__ is None  # a sweep takes a cause for a folder that fails
    with pytest.raises(UserError, match=r"^as it is$"):
        load_callable("own_code:refuses", "method")(3)


def test_what_their_code_calls_in_ours_fails_at_their_line(folder: Path) -> None:
    with pytest.raises(UserError, match=r"TypeError: .*\(own_code.py:14\); fix it"):
        load_callable("own_code:ours", "method")(3)


def test_errors_of_ours_stay_what_they_are(folder: Path) -> None:
    function = load_callable("own_code:build", "method")
    script = sys.modules["own_code"].__dict__  # it calls us, and we do not call it
    with pytest.raises(TypeError) as caught:
        eval("load(3)", script)
    assert users_fault(caught.value) is None
    assert users_fault(ValueError("never raised")) is None
    assert function(3) == 3


def test_a_module_imported_on_use_is_asked_once_for_each_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ImportedOnUse("math")
    assert module.pi == math.pi
    monkeypatch.setattr(importlib, "import_module", None)  # a second import would fail
    assert module.pi == math.pi
