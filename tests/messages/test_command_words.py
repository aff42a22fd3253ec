"""What the command line says about a mistake: one sentence with the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import fedglimpse


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --rounds 3", "There is no option --rounds: write rounds=3, without dashes."),
        ("run fedavg", "'fedavg' is neither a .toml file nor key=value: write method=fedavg."),
        (
            "run --resume --out nowhere",
            "--out nowhere does not exist, so there is nothing to resume: name the folder of a "
            "run, or give settings to begin one.",
        ),
        (
            "compare fedavg",
            "compare was given 1 methods: name at least two, such as fedglimpse compare fedavg "
            "fedavg-window.",
        ),
        (
            "compare fedavg mifa method=glimpse",
            "compare has method=glimpse beside fedavg, mifa: name methods as words.",
        ),
        ("sweep x.toml --lanes 0", "--lanes 0 must be a whole number of 1 or more, or auto."),
    ],
)
def test_a_mistake_is_named_with_its_value_and_the_fix(
    words: str, sentence: str, tmp_path: Path
) -> None:
    done = fedglimpse(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"fedglimpse: {sentence}\n"


def test_overrides_that_a_method_ignores_are_named(tmp_path: Path) -> None:
    words = ["method=fedavg", "agent.lr=0.1", "agent.gamma=0.8", "rounds=1", "--quiet"]
    done = fedglimpse("run", *words, cwd=tmp_path)
    assert done.stderr == (
        "agent.lr, agent.gamma have no effect with method=fedavg: only method=glimpse has that "
        "agent.\n"
    )
