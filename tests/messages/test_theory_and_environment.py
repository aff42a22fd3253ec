"""What users of `fedglimpse theory` and of the environment read: the value, and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedglimpse.env.settings import settings_of
from fedglimpse.errors import UserError
from fedglimpse.theory.panel import measure_run, read_panel
from theory.small_run import run_with_models


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"target": 80.0}, "target=80.0 is not an accuracy: use a number in (0, 1], such as 0.8."),
        ({"target_on": "train"}, "target_on='train' is unknown. Use test, proxy."),
        ({"vary": ("data",)}, "vary='data' is unknown. Use partition, visibility, model."),
        (
            {"reports": ("proxy_logits",)},
            "reports=proxy_logits has no fixed width, so that it cannot be an observation: use "
            "sketch, delta_sketch, or reports of one number for each client.",
        ),
    ],
)
def test_a_wrong_argument_of_the_environment(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        settings_of({}, **arguments)
    assert str(caught.value) == sentence


def test_a_run_without_models_says_how_to_store_them(tmp_path: Path) -> None:
    run = run_with_models(tmp_path / "a", every=0, method="fedavg", rounds=1)
    (run / "checkpoint.pt").unlink()
    with pytest.raises(UserError) as caught:
        measure_run(run)
    assert str(caught.value) == (
        f"{run} has no stored model of a round in which clients were chosen: run it with "
        "checkpoint.keep_models=10."
    )


def test_a_damaged_panel_says_how_to_measure_again(tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        read_panel(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'theory.json'} cannot be read (KeyError): leave --reuse out to measure the "
        "run again."
    )
