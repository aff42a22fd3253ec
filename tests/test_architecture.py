"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

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
    "agent": {"errors", "fields", "rng", "storage", "types"},
    "federation": {"errors", "fields", "plugins", "rng", "types"},
    # `agent.*`, `data.*` and `visibility.*` are declared in their own rooms
    "config": {"agent", "data", "errors", "federation", "fields"},
    "data": {"errors", "fields", "plugins", "rng", "storage"},
    "simulation": {"config", "data", "errors", "federation", "plugins", "rng", "types"},
    "methods": {
        "agent", "config", "errors", "federation", "fields", "plugins", "rng", "types",
    },
    "runs": {
        "agent", "config", "data", "errors", "federation", "methods", "plugins", "rng",
        "simulation", "storage", "types", "version",
    },
    "theory": {"config", "data", "errors", "rng", "runs", "simulation", "storage", "studies"},
    "studies": {
        "config", "data", "errors", "methods", "plugins", "rng", "runs", "storage", "types",
        "version",
    },
    "flower": {
        "agent", "config", "data", "errors", "federation", "methods", "plugins", "rng", "runs",
        "simulation", "storage", "types", "version",
    },
    "env": {
        "agent", "config", "errors", "federation", "methods", "plugins", "rng", "runs",
        "simulation", "types",
    },
}  # fmt: skip

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 60
GLOBAL_RANDOMNESS = ("torch.manual_seed", "random.seed", "torch.default_generator")
GENERATORS = ("np.random.Generator", "np.random.Philox", "np.random.PCG64")

# The three lists below may only become shorter.
REPEATED_CLASS_NAMES = {
    "Options",  # of a method, in its file
}
ROOMS_TO_DESCRIBE: set[str] = {"data", "simulation"}
MOST_PRIVATE_WORDS = 8

FRONT_PAGES = ("README.md", "docs/index.md", "study/README.md")
PRIVATE_WORDS = re.compile(
    r"\b(really|by lot|can(?:not)? be told|what came of|mend(?:ed|ing)?|in the place of"
    r"|gone on with|goes on with|anew|is told|are told|whoever)\b",
    re.IGNORECASE,
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedglimpse"):
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names


def test_imports_point_one_way() -> None:
    forbidden: list[str] = []
    for path in FILES:
        if room(path) not in ALLOWED:
            continue
        others = imported_rooms(path) - {room(path)} - ALLOWED[room(path)]
        if others:
            forbidden.append(f"{name_of(path)} imports {sorted(others)}")
    assert not forbidden


def files_of(module: str) -> set[Path]:
    """Return the files that importing a module of the package runs, itself and its packages."""
    parts = module.split(".")[1:]
    files: set[Path] = set()
    for length in range(len(parts) + 1):
        place = SOURCE.joinpath(*parts[:length])
        files |= {place / "__init__.py", place.with_suffix(".py")} & set(FILES)
    return files


def imported_at_the_top(path: Path) -> set[str]:
    """Return the modules that a file imports when it is imported itself."""
    modules: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_the_command_line_is_read_without_torch() -> None:
    """Help and mistakes are answered at once, see `cli/entry.py`."""
    waiting = [SOURCE / "cli" / "main.py"]
    followed: set[Path] = set()
    while waiting:
        path = waiting.pop()
        followed.add(path)
        for module in imported_at_the_top(path):
            assert module.split(".")[0] != "torch", f"{name_of(path)} imports torch"
            if module.startswith("fedglimpse"):
                waiting += files_of(module) - followed
    assert SOURCE / "config" / "checks.py" in followed


def test_files_and_functions_are_short() -> None:
    long: list[str] = []
    for path in [*FILES, *TOOLS]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES_OF_A_FILE:
            long.append(f"{name_of(path)} has {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{name_of(path)}:{node.lineno} {node.name} has {lines} lines")
    assert not long


def test_a_class_name_means_one_thing() -> None:
    files: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(name_of(path))
    repeated = {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}
    unexpected = {name: repeated[name] for name in repeated if name not in REPEATED_CLASS_NAMES}
    assert not unexpected


def missing_from_docstring(file: Path) -> list[str]:
    """Return what the docstring of a room does not say."""
    text = " ".join((ast.get_docstring(tree_of(file)) or "").split())
    missing: list[str] = []
    if len(text.split()) < 12:
        missing.append("what lives here")
    if "import" not in text:
        missing.append("what it may import")
    if "Begin with" not in text:
        missing.append("where to begin")
    return missing


def test_every_room_says_what_it_is() -> None:
    problems: list[str] = []
    for file in SOURCE.glob("*/__init__.py"):
        missing = missing_from_docstring(file)
        if missing and file.parent.name not in ROOMS_TO_DESCRIBE:
            problems.append(f"{name_of(file)} does not say {', '.join(missing)}")
    for file in SOURCE.glob("*/*/__init__.py"):
        if not ast.get_docstring(tree_of(file)):
            problems.append(f"{name_of(file)} has no docstring")
    assert not problems


def test_the_words_are_those_of_the_field() -> None:
    lines: list[str] = []
    for page in [*FILES, *(ROOT / page for page in FRONT_PAGES if (ROOT / page).exists())]:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if PRIVATE_WORDS.search(line):
                lines.append(f"{name_of(page)}:{number} {line.strip()}")
    assert len(lines) <= MOST_PRIVATE_WORDS, "\n".join(lines)


def test_no_global_randomness() -> None:
    for path in FILES:
        if room(path) == "rng":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                where = f"{name_of(path)}:{node.lineno} {dotted}"
                assert dotted not in GLOBAL_RANDOMNESS, where
                if dotted.startswith("np.random."):
                    assert dotted in GENERATORS, where


def names_no_encoding(call: ast.Call) -> bool:
    """Say whether a call reads or writes text in whatever encoding the machine prefers."""
    name = ast.unparse(call.func).rpartition(".")[2]
    keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
    words = [ast.literal_eval(a) if isinstance(a, ast.Constant) else None for a in call.args]
    if "encoding" in keywords:
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
        return "b" not in keywords.get("mode", "") + "".join(map(str, words[:1]))
    return name in ("run", "Popen", "check_output") and keywords.get("text") == "True"


def test_text_files_are_utf_8_everywhere() -> None:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                where = f"{name_of(path)}:{node.lineno} names no encoding"
                assert not names_no_encoding(node), where
