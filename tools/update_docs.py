"""Rewrite what is generated: python tools/update_docs.py [--check].

A generated table in docs/ stands between `<!-- name:begin -->` and `<!-- name:end -->`; the table
of `fedglimpse methods` is a file of the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fedglimpse.data.partition import PARTITIONS
from fedglimpse.federation.reports import CATALOGUE, Need, Sizes
from fedglimpse.federation.visibility import PATTERNS
from fedglimpse.methods import descriptions, registry
from fedglimpse.methods.describe import describe
from method_pages import comparison, with_figures
from settings_table import settings_table

ROOT = Path(__file__).parents[1]
SIZES = Sizes(state=5, sketch=7, proxy=11, classes=13)
LETTERS = {0: "–", 1: "1", 5: "d", 7: "D", 11 * 13: "P·C"}


def needs_table() -> str:
    """Every report a method can ask for."""
    head = "| name | phase | what it is | floats up |\n|---|---|---|---|\n"

    def sent(need: Need) -> str:
        return "the whole update" if need.uploads_model else LETTERS[need.up(SIZES)]

    return head + "\n".join(
        f"| `{name}` | {need.phase}{', oracle' if need.oracle else ''} | {need.meaning} | "
        f"{sent(need)} |"
        for name, need in CATALOGUE.items()
    )


def partitions_table() -> str:
    """Every partition of training rows, with the settings that it reads."""
    lines = ["| `data.partition` | what clients hold | settings |", "|---|---|---|"]
    for name, kind in PARTITIONS.items():
        settings = ", ".join(f"`data.{setting}`" for setting in kind.settings)
        lines.append(f"| `{name}` | {kind.meaning} | {settings} |")
    return "\n".join(lines)


def visibility_table() -> str:
    """Every visibility pattern."""
    lines = ["| `visibility.kind` | who is visible in a round |", "|---|---|"]
    for name, pattern in PATTERNS.items():
        lines.append(f"| `{name}` | {pattern.meaning} |")
    return "\n".join(lines)


def method_descriptions() -> str:
    """Every method as `fedglimpse methods` shows it."""
    described = [describe(registry.info(name)) for name in registry.MODULES]
    return descriptions.as_json(described) + "\n"


def trainers_table() -> str:
    """The trainers' times from benchmarks/results/trainers.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "trainers.json").read_text())
    lines = [
        f"`python benchmarks/trainers.py` on {found['cpu']}, {found['threads']} threads, "
        f"torch {found['torch']}; median seconds of local training, and ratio to the plain loop:",
        "",
        "| case | plain PyTorch loop | serial | batched | `auto` picks |",
        "|---|---|---|---|---|",
    ]
    for case, result in found["results"].items():
        cells = [
            f"{result['seconds'][name]:.2f} s ({result['ratio'][name]:.2f})"
            for name in ("plain loop", "serial", "batched")
        ]
        lines.append(f"| {case} | {' | '.join(cells)} | {result['default']} |")
    return "\n".join(lines)


def agent_table() -> str:
    """The agent's times from benchmarks/results/agent.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "agent.json").read_text())
    lines = [
        f"{found['cpu']}, one thread, torch {found['torch']}; milliseconds, median of "
        f"{found['rounds_measured']} rounds, and the range of the middle 80 %:",
        "",
        "| preset | a round | 10 % to 90 % | million multiply-adds, twice |",
        "|---|---|---|---|",
    ]
    for preset, ms in found["median"].items():
        spread = f"{ms['round_ms_p10']:.0f} to {ms['round_ms_p90']:.0f}"
        lines.append(
            f"| `{preset}` | {ms['round_ms']:.0f} | {spread} | {ms['mflop_per_round']:.0f} |"
        )
    return "\n".join(lines)


def gpu_table() -> str:
    """Training times on a GPU from benchmarks/results/gpu_training.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu_training.json").read_text())
    lines = [
        f"{found['device']}, torch {found['torch']}:",
        "",
        "| model | trainer | precision | clients at once | ms per 10 clients | TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        lines.append(
            f"| {r['model']} | {r['trainer']} | {r['precision']} | {r['clients']} | "
            f"{r['ms_per_10_clients']} | {r['tflops']} |"
        )
    return "\n".join(lines)


def rounds_table() -> str:
    """Whole rounds on a GPU from benchmarks/results/bench_round_cuda.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "bench_round_cuda.json").read_text())
    parts = ("train", "reports", "select", "aggregate", "evaluate", "learn", "other")
    lines = [
        f"{found['device']}, torch {found['torch']}; milliseconds of a round and lane, mean:",
        "",
        "| data | lanes | precision | ms | TFLOP/s in training | "
        f"{' | '.join(parts)} | one client at a time takes | commit |",
        "|---" * (7 + len(parts)) + "|",
    ]
    for r in found["results"]:
        shares = " | ".join(f"{r['share'][part]:.0%}" for part in parts)
        times = f"{r['times_serial']:.0f} times as long" if "times_serial" in r else "–"
        lines.append(
            f"| {r['dataset']} | {r['lanes']} | {r['precision']} | {r['ms_per_lane_round']:.1f} | "
            f"{r['tflops_in_training']:.0f} | {shares} | {times} | {r['commit']} |"
        )
    return "\n".join(lines)


def population_table() -> str:
    """Rounds of growing populations from benchmarks/results/population.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "population.json").read_text())
    lines = ["| clients | seconds a round | peak memory, MiB |", "|---|---|---|"]
    for clients, r in found["results"].items():
        shown = f"{r['seconds_per_round']:.3f} | {r['peak_mib']:.0f}"
        lines.append(f"| {int(clients):,} | {shown} |")
    return "\n".join(lines)


def peers_table() -> str:
    """Whole rounds beside other simulators from benchmarks/results/peers.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())
    lines = ["| | Fashion, s a round | ours / theirs | HAR, s a round | ours / theirs |"]
    lines.append("|---|---|---|---|---|")
    cases = [found["results"][case] for case in ("fashion", "har")]
    for name in cases[0]:
        cells = [f"{c[name]['seconds']:.2f} | {c[name]['fedglimpse_takes']:.2f}" for c in cases]
        lines.append(f"| {name} {cases[0][name]['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def environment_table() -> str:
    """Lanes against a loop of environments from benchmarks/results/environment.json."""
    found = json.loads((ROOT / "benchmarks" / "results" / "environment.json").read_text())
    lines = ["| device | lanes | steps/s, lanes | steps/s, loop | ratio |", "|---|---|---|---|---|"]
    for one in found.values():
        speeds = [f"{one[name]['steps_per_second']:.0f}" for name in ("vector", "loop")]
        keys = " ".join(one["keys"])
        lines.append(
            f"| {one['device']}, {keys} | {one['lanes']} | {' | '.join(speeds)} | "
            f"{one['ratio']:.1f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "rounds": ("docs/simulator.md", rounds_table),
    "population": ("docs/simulator.md", population_table),
    "environment": ("docs/environment.md", environment_table),
    "peers": ("docs/simulator.md", peers_table),
    "visibility": ("docs/data.md", visibility_table),
    "needs": ("docs/add-a-method.md", needs_table),
    "settings": ("docs/settings.md", settings_table),
    "partitions": ("docs/data.md", partitions_table),
    "agent": ("docs/methods/glimpse.md", agent_table),
    "glimpse-digits": ("docs/methods/glimpse.md", lambda: comparison("glimpse-digits")),
    "all-digits": ("docs/methods/README.md", lambda: comparison("all-digits")),
    "gpu": ("docs/simulator.md", gpu_table),
    "trainers": ("docs/simulator.md", trainers_table),
}


PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))


def updated(name: str) -> tuple[Path, str]:
    """Return a page and what it should say."""
    place, make = TABLES[name]
    path = ROOT / place
    before, begin, rest = path.read_text().partition(f"<!-- {name}:begin -->")
    _, end, after = rest.partition(f"<!-- {name}:end -->")
    if not (begin and end):
        sys.exit(f"{path} has no place for table '{name}': write <!-- {name}:begin --> and :end.")
    return path, f"{before}{begin}\n{make()}\n{end}{after}"


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield pages, what each should say, and what of it may be stale.

    A page may have several tables: what is yielded is to be written before the next is asked for.
    """
    for name in TABLES:
        yield *updated(name), f"table '{name}'"
    for path in PAGES:
        yield path, with_figures(path), "measured figures"
    yield descriptions.FILE, method_descriptions(), "the table of `fedglimpse methods`"


def said(path: Path) -> str:
    """Return what a page says now; nothing where there is none."""
    return path.read_text() if path.exists() else ""


def main() -> None:
    """Rewrite, or with --check only say what is stale."""
    found = 0
    for path, text, what in pages():
        if said(path) == text:
            continue
        found += 1
        print(f"{path}: {what} is stale")
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    sys.exit(found if "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
