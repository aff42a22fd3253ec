"""Whatever is wrong with the files of a report ends in one sentence that names the file."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from made_up import plan, records_of, write_run
from typer.testing import CliRunner

from fedglimpse.cli.results import report
from fedglimpse.errors import UserError
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study

WORDS = {"data.name": "digits", "data.partition": "label_skew", "rounds": 20}
Line = dict[str, Any]
app = typer.Typer()
app.command()(report)


def called(*words: object) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for method in ("fedavg", "glimpse"):
        records = records_of(0, 20, 40, 0.8, pace=0.3, thinking=method == "glimpse")
        write_run(tmp_path / "runs" / method, {**WORDS, "method": method}, records)
    return tmp_path / "runs"


def edit(folder: Path, change: Callable[[list[Line]], None], method: str = "fedavg") -> None:
    path = folder / method / "rounds.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, "gone") for name in ("rejected", "accuracy", "reward", "uplink_bytes", "seconds")],
        ("reward", "good"),
        ("rejected", None),
        ("selected", [-1]),
        ("visible", ["3"]),
        ("macro_f1", [0.5]),
        ("accuracy", "high"),
        ("server_flops", math.nan),
        ("round", "5"),
        ("seed", 0.5),
    ],
)
def test_a_bad_field_names_file_and_line(folder: Path, name: str, value: object) -> None:
    def change(records: list[Line]) -> None:
        records[6][name] = value
        if value == "gone":
            del records[6][name]

    edit(folder, change)
    with pytest.raises(UserError, match=rf"fedavg/rounds\.jsonl, line 7 .*`{name}`.*delete"):
        called(folder)


@pytest.mark.parametrize("name", ["visible", "selected", "rejected"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_client_out_of_range(folder: Path, name: str, stored: bool) -> None:
    if stored:
        text = json.dumps({"0": [[1, 0]] * 40})
        (folder / "fedavg" / "partition.json").write_text(text)
    edit(folder, lambda records: records[6][name].append(40))
    with pytest.raises(UserError, match=r"fedavg/rounds\.jsonl names client 40 in round 6 of seed"):
        called(folder)


def test_a_round_that_comes_twice(folder: Path) -> None:
    edit(folder, lambda records: records.append(records[-1]))
    with pytest.raises(UserError, match=r"line 21 holds round 19 of seed 0 a second time: delete"):
        called(folder)


def test_a_round_that_is_missing(folder: Path) -> None:
    edit(folder, lambda records: records.pop(4) and None)
    with pytest.raises(UserError, match=r"line 5 holds round 5 of seed 0 before round 4: restore"):
        called(folder)


def test_records_without_a_configuration_in_a_sweep(folder: Path) -> None:
    cell = {"id": "c", "setting": "s", "variant": "fedavg", "seed": 0}
    (folder / "sweep.json").write_text(json.dumps(plan([cell])))
    (folder / "fedavg").rename(folder.parent / "c")
    (folder / "cells").mkdir()
    (folder.parent / "c").rename(folder / "cells" / "c")
    assert load_study(folder).count("finished") == 1
    (folder / "cells" / "c" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"cells/c/config\.toml is not there.*: restore it"):
        called(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '{"0": 3}', '{"0": []}', '{"0": [[1], [1, 2]]}', '{"0": [["a"]]}', '{"0": [[]]}'],
)
def test_a_damaged_partition(folder: Path, content: str) -> None:
    (folder / "fedavg" / "partition.json").write_text(content)
    with pytest.raises(UserError, match=r"fedavg/partition\.json .*restore or delete it"):
        called(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, None])  # null: as records are written now
def test_a_diverged_run_counts_as_nothing_and_is_said_to(folder: Path, value: float | None) -> None:
    def change(records: list[Line]) -> None:
        for record in records[10:]:
            record |= dict.fromkeys(("accuracy", "macro_f1", "loss", "reward"), value)

    edit(folder, change)
    output = called(folder)
    said = "diverged: digits label skew mobile, fedavg, seed 0 (10 rounds with a score that is"
    assert said in output
    assert said in (folder / "report" / "report.html").read_text()
    facts = load_study(folder).cells[0].facts
    assert facts is not None
    assert (facts.accuracy, facts.macro_f1, facts.reward, facts.diverged) == (0, 0, 0, 10)
    assert called(folder / "report" / "study.json.gz", "--out", folder / "again").count(said) == 1


def test_finished_without_its_last_rounds_is_not_finished(folder: Path) -> None:
    edit(folder, lambda records: records.pop() and None)
    said = "seed 0 (fedavg/rounds.jsonl has 19 of 20 rounds, though there is a summary)"
    assert f"unfinished: digits label skew mobile, fedavg, {said}" in called(folder)

    def change(records: list[Line]) -> None:
        records.append({**records[-1], "round": 19})
        for record in records:
            record.update(accuracy=None, macro_f1=None, per_class_f1=None)

    edit(folder, change)
    assert "(fedavg/rounds.jsonl has no accuracy of the last rounds)" in called(folder)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "x"])
def test_attention_that_is_no_number_is_not_drawn(folder: Path, weight: object) -> None:
    def change(records: list[Line]) -> None:
        records[0]["attention"][0][0] = weight
        records[0]["epsilon"] = math.nan

    edit(folder, change, "glimpse")
    assert "glimpse" in called(folder)
    trace = load_study(folder).cells[1].trace
    assert trace is not None
    first, last = trace.moments[0], trace.moments[-1]
    assert (first.round, first.attention, first.epsilon) == (1, None, None)
    assert last.attention is not None


def test_brackets_are_printed_as_they_are(folder: Path) -> None:
    cells = [{"id": f"c{i}", "setting": f"s[/{i}]", "variant": "glimpse [raw]", "seed": 0}
             for i in range(2)]  # fmt: skip
    text = json.dumps(plan(cells, title="A [/b] title", claim="[/x]", control="glimpse [raw]"))
    (folder / "sweep.json").write_text(text)
    (folder / "cells").mkdir()
    (folder / "fedavg").rename(folder / "cells" / "c0")
    (folder / "cells" / "c1").mkdir()
    (folder / "cells" / "c1" / "failed.json").write_text('{"reason": "no [/data/x] there"}')
    output = called(folder)
    for said in ("A [/b] title", "[/x]", "s[/0]", "glimpse [raw]", "(no [/data/x] there)"):
        assert said in output
    assert "minus glimpse [raw]" in output


@pytest.mark.parametrize("theory", [{"lanes": 3}, {"lanes": [1]}, {"notes": 4}, {"a": {"b": [1]}}])
def test_a_theory_of_another_kind_is_not_drawn(folder: Path, theory: dict[str, Any]) -> None:
    (folder / "fedavg" / "theory.json").write_text(json.dumps(theory))
    assert "fedavg" in called(folder)


HEADS = [
    ("targets", [1], "`targets` is"),
    ("targets", {"digits label skew mobile": "high"}, "`targets.digits"),
    ("targets", {"digits label skew mobile": math.nan}, "`targets.digits"),
    ("targets", {"digits label skew mobile": 80}, "`targets.digits"),
    ("paper", 3, "`paper` is 3"),
    ("paper", {"settings": 3}, "has `settings` = 3"),
    ("paper", {"claims": []}, "holds no published figures: it must say its `source`"),
    ("paper", {"source": "S", "title": "T", "claims": [1]}, "has a claim 1"),
    ("title", 3, "`title` is 3"),
    ("claim", None, "`claim` is None"),
    ("control", 3, "`control` is 3"),
]


@pytest.mark.parametrize(("name", "value", "said"), HEADS)
def test_a_stored_study_with_a_wrong_head(
    folder: Path, name: str, value: object, said: str
) -> None:
    changed(folder, lambda data: data.update({name: value}))
    with pytest.raises(UserError) as caught:
        called(folder / "report" / "study.json.gz")
    assert said in str(caught.value)
    assert f"{folder}/report/study.json.gz is damaged" in str(caught.value)


@pytest.mark.parametrize(("name", "value", "said"), HEADS)
def test_a_plan_with_a_wrong_head(folder: Path, name: str, value: object, said: str) -> None:
    cells = [{"id": "c", "setting": "digits", "variant": "fedavg", "seed": 0}]
    (folder / "sweep.json").write_text(json.dumps(plan(cells, **{name: value})))
    with pytest.raises(UserError) as caught:
        called(folder)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_cell_that_comes_twice(folder: Path) -> None:
    cell = {"id": "c", "setting": "digits", "variant": "fedavg", "seed": 0}
    (folder / "sweep.json").write_text(json.dumps(plan([cell, {**cell, "id": "d"}])))
    with pytest.raises(UserError, match=r"sweep\.json is damaged .*seed 0 is there twice"):
        called(folder)
    (folder / "sweep.json").unlink()
    changed(folder, lambda data: data["cells"].append(data["cells"][0]))
    with pytest.raises(UserError, match=r"study\.json\.gz is damaged.*seed 0 is there twice"):
        called(folder / "report" / "study.json.gz")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("participation.chosen", []),
        ("participation.chosen", [1]),
        ("participation.seen", [[]]),
        ("facts.accuracy", math.nan),
        ("facts.accuracy", "high"),
        ("facts.curve.smooth", [0.5]),
        ("facts.curve.accuracy", None),
        ("facts.climb.played", None),
        ("facts.climb.totals", {}),
        ("facts.climb.costs.uplink_bytes", 3),
        ("config.rounds", None),
        ("config.method", 3),
        ("seed", "0"),
        ("state", "gone"),
        ("variant", None),
        ("theory", 3),
        ("environment", None),
        ("trace.moments.0.q", [math.nan]),
        ("trace.moments.0.clients", None),
        ("trace.visible", 3),
    ],
)
def test_a_stored_cell_with_a_wrong_value(folder: Path, where: str, value: object) -> None:
    def change(data: Line) -> None:
        place: Any = data["cells"][1]
        *path, last = where.split(".")
        for step in path:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value

    changed(folder, change)
    with pytest.raises(UserError, match=r"study\.json\.gz is damaged.*: restore it, or make"):
        called(folder / "report" / "study.json.gz")


@pytest.mark.parametrize("counts", [None, [], [[1], 3], [[]], [["a"]]])
def test_a_stored_partition_with_wrong_counts(folder: Path, counts: object) -> None:
    changed(folder, lambda data: data["partitions"][0].update(counts=counts))
    with pytest.raises(UserError, match=r"study\.json\.gz is damaged.*partition\.counts"):
        called(folder / "report" / "study.json.gz")


def test_a_stored_study_with_attention_that_is_no_number(folder: Path) -> None:
    def change(data: Line) -> None:
        data["cells"][1]["trace"]["moments"][0]["attention"][0][0] = math.nan

    changed(folder, change)
    assert "glimpse" in called(folder / "report" / "study.json.gz")


def changed(folder: Path, change: Callable[[Line], None]) -> None:
    """Store the study of a folder as its report would, then change what was stored."""
    path = folder / "report" / "study.json.gz"
    path.parent.mkdir(exist_ok=True)
    write_study(load_study(folder), path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
