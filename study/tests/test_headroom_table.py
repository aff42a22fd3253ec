from __future__ import annotations

import json
from pathlib import Path

from reproduction.headroom import headroom


def stored(folder: Path, name: str, random: list[float], greedy: list[float]) -> None:
    probe = {"spread": 0.02, "noise": 0.01, "best": 0.04, "additive": 0.5, "evenness": 0.25}
    agent = {**probe, "agreement": -0.125, "regret": 1.0625}
    results = {
        "accuracy": {"random": random, "greedy": greedy},
        "drift": 0.0345,
        "labels_in_sketches": 0.21,
        "probes": {"random": probe, "glimpse": agent},
    }
    text = json.dumps({"what": f"python it --name {name}", "results": results})
    (folder / f"{name}.json").write_text(text)


def test_without_results_it_says_so(tmp_path: Path) -> None:
    assert headroom(tmp_path) == "Not run yet."


def test_a_gain_is_that_over_the_random_choice_of_the_same_seed(tmp_path: Path) -> None:
    stored(tmp_path, "one", [0.5, 0.6, 0.7], [0.51, 0.62, 0.73])
    stored(tmp_path, "two", [0.5, 0.5, 0.5], [0.4, 0.4, 0.4])
    text = headroom(tmp_path)
    assert "    python it --name one\n    python it --name two" in text
    assert "| random | 60.0 ± 10.0 | 50.0 ± 0.0 |" in text
    assert (
        "| greedy | 62.0 ± 11.0<br>+2.0 [+1.0, +3.0] | 40.0 ± 0.0<br>−10.0 [−10.0, −10.0] |" in text
    )
    assert "| drift | 3.45 | 3.45 |" in text
    assert "| regret | 1.06 | 1.06 |" in text
