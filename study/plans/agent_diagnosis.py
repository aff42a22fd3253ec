"""What did the agent learn in runs that are there already?

    python plans/agent_diagnosis.py runs/table1 --name table1

Reads the records of every run of a variant (default: `glimpse`) and measures, from round --after
on, when the agent explores as little as it ever will:

    spread / error     standard deviation of Q over the visible clients, over the root mean squared
                       TD error: below or near 1, Q cannot tell clients apart
    spread / level     the same over the mean of Q
    attention          entropy of the attention over remembered global models, as a share of what
                       attending to all of them alike has: 1 where nothing is preferred
    persistence        correlation over clients of their place in Q (standardised within the visible
                       set) in the first and in the second half of those rounds: 1 where the same
                       clients are always preferred
    agreement          correlation over exploring rounds, where the choice is drawn, of the mean Q
                       of the chosen (standardised) with the change of the proxy score that came

The figures, seed by seed, go to results/agent_diagnosis/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import correlation, fmean, pstdev
from typing import Any

from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.run_folder import read_records

RESULTS = Path(__file__).parents[1] / "results" / "agent_diagnosis"
SEEN = 3  # times that a client must be seen in both halves
ROUNDS = 10  # exploring rounds that a correlation needs

Record = Mapping[str, Any]


def diagnose(records: Sequence[Record], after: int, loss: str, history: int) -> dict[str, float]:
    """Measure one run; what cannot be told is left out.

    Args:
        records: of one seed, in order.
        after: first round that counts.
        loss: `agent.loss`, what a TD loss is the mean of.
        history: `agent.history`, remembered models besides the current one.
    """
    late = [r for r in records if r["round"] >= after and r.get("q") and r.get("td_loss")]
    if not late:
        return {}
    squares = 2 if loss == "smooth_l1" else 1  # of a small error, the loss is half its square
    error = math.sqrt(squares * fmean(r["td_loss"] for r in late))
    spread = fmean(r["q_spread"] for r in late)
    middle = (after + records[-1]["round"] + 1) // 2
    found: dict[str, float | None] = {
        "spread / error": spread / error,
        "spread / level": spread / abs(fmean(r["mean_q"] for r in late)),
        "attention": fmean(r["attention_entropy"] for r in late) / math.log(history + 1),
        "persistence": persistence(
            [r for r in late if r["round"] < middle], [r for r in late if r["round"] >= middle]
        ),
        "agreement": agreement(records, after),
    }
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def persistence(first: Iterable[Record], second: Iterable[Record]) -> float | None:
    """Correlate the places of clients in two periods."""
    before, then = _places(first), _places(second)
    both = sorted(before.keys() & then.keys())
    return _correlation([before[i] for i in both], [then[i] for i in both])


def agreement(records: Sequence[Record], after: int) -> float | None:
    """Correlate what Q says of sets drawn at random with what came of them."""
    said, came = [], []
    for last, now in pairwise(records):
        if now["round"] < after or now.get("behaviour") != "explore":
            continue
        places = dict(zip(now["visible"], _standardised(now), strict=False))
        if len(now["selected"]) < len(places):  # a choice, and Q tells clients apart at all
            said.append(fmean(places[i] for i in now["selected"]))
            came.append(now["reward"] - last["reward"])
    return _correlation(said, came) if len(said) >= ROUNDS else None


def _places(records: Iterable[Record]) -> dict[int, float]:
    """Return the mean place in Q of every client that was seen often enough."""
    found: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for client, place in zip(record["visible"], _standardised(record), strict=False):
            found[client].append(place)
    return {client: fmean(places) for client, places in found.items() if len(places) >= SEEN}


def _standardised(record: Record) -> list[float]:
    """Return Q within the visible set; nothing where it is flat or somebody was refused."""
    q = record["q"]
    if len(q) != len(record["visible"]) or pstdev(q) == 0:
        return []
    middle, spread = fmean(q), pstdev(q)
    return [(value - middle) / spread for value in q]


def _correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    if len(a) < SEEN or pstdev(a) == 0 or pstdev(b) == 0:
        return None
    return correlation(a, b)


def main() -> None:
    """Read sweeps and store what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweeps", nargs="+", type=Path, help="folders made by fedglimpse sweep")
    parser.add_argument("--name", required=True)
    parser.add_argument("--variant", default="glimpse")
    parser.add_argument("--after", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    words = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for sweep in words.sweeps:
        for cell in load_study(sweep).cells:
            if cell.variant == words.variant and cell.state == "finished":
                if not (records := read_records(sweep / "cells" / cell.id)):
                    sys.exit(f"{sweep} has no records: name a folder made by fedglimpse sweep.")
                how = cell.config["agent.loss"], cell.config["agent.history"]
                found[cell.setting][str(cell.seed)] = diagnose(records, words.after, *how)
    if not found:
        sys.exit(f"No finished run of {words.variant} in {', '.join(map(str, words.sweeps))}.")
    command = shlex.join(["python", "plans/agent_diagnosis.py", *sys.argv[1:]])
    words.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"what": command, "after": words.after, "results": found}, indent=1)
    (words.out / f"{words.name}.json").write_text(text + "\n")
    print(words.out / f"{words.name}.json")


if __name__ == "__main__":
    main()
