"""Take out every sync and every checksum, one by one: each time a test must fail.

    python tests/faults/mutations.py [--only WORD]

A line for each says which test noticed. Ends with exit code 1 if one was not missed.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/fedglimpse")
# Calls that only sync or verify: what a program computes is the same without them.
SYNCS = ("os.fsync", "sync_folder", "store.sync_folder")
CHECKS = (
    "store.check", "store.check_folder", "store.check_beginning", "check_beginning",
    "check_lane", "check_round", "folder.check_finished", "_check_counted",
)  # fmt: skip
TESTS = (
    "tests/storage", "tests/runs/test_saved_state.py", "tests/cli/test_verify.py",
    "tests/studies/sweep/test_parts.py", "tests/theory/test_panel.py", "tests/faults",
    "tests/flower/test_flower_saved.py", "tests/e2e/test_policies.py",
)  # fmt: skip


READS = ("store.read", "store.unsealed")  # which verify; a mutation reads without


@dataclass(frozen=True)
class Mutation:
    """A statement to take out, or an expression to replace."""

    file: Path  # relative to the repository
    first: int  # lines
    last: int
    text: str
    columns: tuple[int, int] = (0, 0)  # of an expression: where it begins and ends
    instead: str = "pass"

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.first} {self.text}"


def mutations() -> Iterator[Mutation]:
    """Yield every statement that syncs, verifies, or refuses what is damaged."""
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if is_guard(node):
                assert isinstance(node, ast.stmt)
                text = ast.unparse(node).partition("\n")[0]
                last = node.end_lineno or node.lineno
                yield Mutation(path.relative_to(ROOT), node.lineno, last, text)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in READS:
                yield Mutation(
                    path.relative_to(ROOT),
                    node.lineno,
                    node.end_lineno or node.lineno,
                    ast.unparse(node),
                    (node.col_offset, node.end_col_offset or 0),
                    f"({ast.unparse(node.args[0])}).read_bytes()",
                )


def is_guard(node: ast.AST) -> bool:
    """Say whether a statement can be taken out to remove a sync or a checksum."""
    if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func)
        is_plain = isinstance(node, ast.Expr)
        return is_plain and called in (*SYNCS, *CHECKS)
    return isinstance(node, ast.Raise) and "checksum" in ast.unparse(node)


def without(mutation: Mutation, repository: Path) -> None:
    """Change a copy of the repository."""
    path = repository / mutation.file
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first = lines[mutation.first - 1]
    indent = first[: len(first) - len(first.lstrip())]
    before = indent
    after = "\n"
    if mutation.columns != (0, 0):
        before = first.encode()[: mutation.columns[0]].decode()
        after = lines[mutation.last - 1].encode()[mutation.columns[1] :].decode()
    lines[mutation.first - 1 : mutation.last] = [f"{before}{mutation.instead}{after}"]
    path.write_text("".join(lines), encoding="utf-8")


def failing_test(repository: Path) -> str:
    """Return the first test that fails there, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:120] if failed else done.stdout[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations with this word in their line")
    arguments = parser.parse_args()
    unnoticed = 0
    tried = 0
    for mutation in [None, *mutations()]:
        if mutation is not None and arguments.only not in str(mutation):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "repository"
            copy.mkdir()
            for name in ("src", "tests", "tools", "examples", "study"):
                shutil.copytree(ROOT / name, copy / name, symlinks=True)
            shutil.copy(ROOT / "pyproject.toml", copy)
            if mutation is not None:
                without(mutation, copy)
            test = failing_test(copy)
        if mutation is None:
            if test:
                sys.exit(f"a test fails though nothing was changed: {test}")
            continue
        tried += 1
        unnoticed += not test
        print(f"{mutation}\n    {test or 'NO TEST FAILED'}", flush=True)
    print(f"{tried} syncs and checks taken out one by one, {unnoticed} without a failing test")
    sys.exit(unnoticed > 0)


if __name__ == "__main__":
    main()
