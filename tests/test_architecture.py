"""The house rules that a machine can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedglimpse"
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = SOURCE.parents[1]
TOOLS = [*sorted((ROOT / "tools").rglob("*.py")), *sorted((ROOT / "study").rglob("*.py"))]

# A room may import only what is listed, besides itself.
ALLOWED = {
    "errors": set(),
    "version": set(),
    "rng": set(),
    "types": set(),
    "plugins": {"errors"},
    "fields": {"errors"},
    "storage": {"errors", "version"},
    "agent": {"errors", "fields", "rng", "types"},
    "federation": {"errors", "fields", "plugins", "rng", "types"},
    # `agent.*`, `data.*` and `visibility.*` are declared in their own rooms
    "config": {"agent", "data", "errors", "federation", "fields"},
    "data": {"errors", "fields", "plugins", "rng", "storage"},
    "simulation": {"config", "data", "errors", "federation", "rng", "types"},
    "methods": {
        "agent", "config", "errors", "federation", "fields", "plugins", "rng", "types",
    },
    "runs": {
        "agent", "config", "data", "errors", "federation", "methods", "plugins", "rng",
        "simulation", "storage", "types", "version",
    },
    "theory": {"config", "data", "errors", "rng", "runs", "simulation", "studies"},
    "studies": {
        "config", "data", "errors", "methods", "plugins", "rng", "runs", "storage", "types",
        "version",
    },
    "flower": {
        "agent", "config", "data", "errors", "federation", "methods", "plugins", "rng", "runs",
        "simulation", "types", "version",
    },
    "env": {
        "agent", "config", "errors", "federation", "methods", "plugins", "rng", "runs",
        "simulation", "types",
    },
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedglimpse"):
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    if room(path) in ALLOWED:
        assert imported(path) - {room(path)} <= ALLOWED[room(path)]


@pytest.mark.parametrize("path", [*FILES, *TOOLS], ids=lambda p: "/".join(p.parts[-3:]))
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_global_randomness(path: Path) -> None:
    if room(path) == "rng":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            assert dotted not in ("torch.manual_seed", "random.seed", "torch.default_generator")
            if dotted.startswith("np.random."):
                assert dotted in ("np.random.Generator", "np.random.Philox", "np.random.PCG64")


def names_no_encoding(call: ast.Call) -> bool:
    """Say whether a call reads or writes text in whatever encoding the machine prefers."""
    name = ast.unparse(call.func).rpartition(".")[2]
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    words = [ast.literal_eval(a) if isinstance(a, ast.Constant) else None for a in call.args]
    if "encoding" in given:
        return False
    if name == "read_text":
        return not words
    if name == "write_text":
        return len(words) < 2
    if name == "open":
        if isinstance(call.func, ast.Name):
            words = words[1:]
        if None in words:
            return False  # the `open` of a run's folder or of an archive
        return "b" not in given.get("mode", "") + "".join(map(str, words[:1]))
    return name in ("run", "Popen", "check_output") and given.get("text") == "True"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_text_files_are_utf_8_everywhere(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            assert not names_no_encoding(node), f"{path}:{node.lineno} names no encoding"
