from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from made_up import plan, records_of, study_of, write_run

from fedglimpse.errors import UserError
from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.report.tables import cells_csv, rows_csv
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.results.trace import pack, trace_of, unpack

WORDS = {"data.name": "digits", "data.partition": "label_skew", "rounds": 20}


def cell(variant: str, seed: int) -> dict[str, object]:
    name = {"setting": "digits", "variant": variant, "seed": seed, "overrides": {}}
    return {"id": f"digits-{variant}-{seed}", **name}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    cells = [cell(v, s) for v in ("fedavg", "glimpse") for s in (0, 1)]
    (tmp_path / "sweep.json").write_text(json.dumps(plan(cells, control="fedavg")))
    for planned in cells:
        seed, variant = int(str(planned["seed"])), str(planned["variant"])
        records = records_of(seed, 20, 40, 0.8, pace=0.3, thinking=variant == "glimpse")
        words = {**WORDS, "method": variant, "seeds": [seed]}
        write_run(tmp_path / "cells" / str(planned["id"]), words, records)
    return tmp_path


def test_a_sweep_is_read_cell_by_cell(sweep: Path) -> None:
    study = load_study(sweep)
    assert (study.settings, study.variants) == (["digits"], ["fedavg", "glimpse"])
    assert (study.control, study.count("finished")) == ("fedavg", 4)
    first, second = study.of("digits", "glimpse")
    assert first.trace is not None
    assert second.trace is None  # one seed of each variant is enough to look at
    assert len(first.trace.moments) == 12
    assert first.trace.moments[-1].round == 20
    assert len(study.partitions[0].counts) == 40
    assert first.participation is not None
    assert sum(first.participation.chosen) == 20 * 5
    assert 0 < (first.participation.classes_covered or 0) <= 1


def test_compressed_records_failed_and_missing_cells(sweep: Path) -> None:
    packed = sweep / "cells/digits-fedavg-0/rounds.jsonl"
    packed.with_name("rounds.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    (sweep / "cells/digits-fedavg-1/failed.json").write_text('{"reason": "no memory"}')
    (sweep / "cells/digits-fedavg-1/summary.json").unlink()
    (sweep / "cells/digits-glimpse-1/summary.json").unlink()
    missing = sweep / "cells/digits-glimpse-0"
    missing.rename(sweep / "elsewhere")
    states = [(c.state, c.reason) for c in load_study(sweep).cells]
    assert states == [
        ("finished", ""),
        ("failed", "no memory"),
        ("missing", ""),
        ("unfinished", ""),
    ]


def test_a_line_cut_short_is_left_out(sweep: Path) -> None:
    rounds = sweep / "cells/digits-fedavg-0/rounds.jsonl"
    rounds.write_text(rounds.read_text()[:-20])
    facts = load_study(sweep).cells[0].facts
    assert facts is not None
    assert facts.climb.played == 19


def test_a_run_with_lanes_and_a_comparison(tmp_path: Path) -> None:
    for method in ("fedavg", "fedprox"):
        records = [r for s in (0, 1, 2) for r in records_of(s, 20, 40, 0.8)]
        words = {**WORDS, "method": method, "seeds": [0, 1, 2]}
        write_run(tmp_path / method, words, records)
    alone = load_study(tmp_path / "fedavg")
    assert [c.seed for c in alone.cells] == [0, 1, 2]
    assert alone.settings == ["digits label skew mobile"]
    both = load_study(tmp_path)
    assert both.variants == ["fedavg", "fedprox"]
    assert len(both.cells) == 6


def test_partition_is_read_where_it_was_stored(sweep: Path) -> None:
    stored = {"0": [[1, 0]] * 20 + [[0, 1]] * 20}
    (sweep / "cells/digits-fedavg-0/partition.json").write_text(json.dumps(stored))
    assert load_study(sweep).partitions[0].counts == stored["0"]


def test_stored_studies_give_the_same_numbers(sweep: Path, tmp_path: Path) -> None:
    study, path = load_study(sweep), tmp_path / "study.json.gz"
    write_study(study, path)
    again = load_study(path)
    assert again == study
    for table in (rows_csv, cells_csv):
        assert table(analyse(again)) == table(analyse(study))
    before = path.read_bytes()
    write_study(again, path)
    assert path.read_bytes() == before


def test_parts_of_a_study_are_read_as_one(sweep: Path, tmp_path: Path) -> None:
    whole = load_study(sweep)
    folder = tmp_path / "parts"
    folder.mkdir()
    for i, name in enumerate(("study-a.json.gz", "study-b.json.gz")):
        mine = [
            c if c.seed == i else dataclasses.replace(c, state="missing", facts=None)
            for c in whole.cells
        ]
        write_study(dataclasses.replace(whole, cells=mine), folder / name)
    both = load_study(folder)
    assert both.cells == whole.cells
    assert both.partitions == whole.partitions
    assert both.source == str(folder)
    write_study(dataclasses.replace(whole, title="Another"), folder / "study-c.json.gz")
    with pytest.raises(UserError, match="different studies"):
        load_study(folder)


def test_stored_study_of_many_runs_is_small(tmp_path: Path) -> None:
    study = study_of({"a": {}}, {"fedavg": 0.7, "glimpse": 0.8}, [0, 1, 2], 600)
    write_study(study, tmp_path / "study.json.gz")
    assert (tmp_path / "study.json.gz").stat().st_size / len(study.cells) < 15_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no results"),
        ({"format": 9, "version": "7.0"}, "format 9"),
        ({"format": 1, "title": "A sweep"}, r"sweep\.json does not list the cells"),
        ({"format": 1, "cells": None}, r"sweep\.json does not list the cells"),
        ({"format": 1, "cells": [{"id": "a"}]}, r"sweep\.json does not list the cells"),
        (False, r"sweep\.json holds no table"),
        ([1], r"sweep\.json holds no table"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, content: object, message: str) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_study(tmp_path)


@pytest.mark.parametrize(
    "line", ["{", "null", "3", "{}", '{"lane": 0}', "\0\0\0"], ids=lambda line: repr(line)
)
def test_a_bad_line_is_named(sweep: Path, line: str) -> None:
    rounds = sweep / "cells/digits-fedavg-0/rounds.jsonl"
    good = rounds.read_text().splitlines()
    rounds.write_text("\n".join([*good[:6], line, *good[7:], ""]))
    with pytest.raises(UserError, match=r"digits-fedavg-0/rounds\.jsonl, line 7 .*delete"):
        load_study(sweep)


def test_a_line_of_bad_bytes_is_named(sweep: Path) -> None:
    rounds = sweep / "cells/digits-fedavg-0/rounds.jsonl"
    rounds.write_bytes(b"\xff\xfe\n" + rounds.read_bytes())
    with pytest.raises(UserError, match=r"rounds\.jsonl, line 1 "):
        load_study(sweep)


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped", "empty", "folder"])
def test_damaged_packed_records_are_named(sweep: Path, damage: str) -> None:
    rounds = sweep / "cells/digits-fedavg-0/rounds.jsonl"
    whole, packed = gzip.compress(rounds.read_bytes()), rounds.with_name("rounds.jsonl.gz")
    rounds.unlink()
    if damage == "folder":
        packed.mkdir()
    else:
        flipped = whole[:40] + bytes(b ^ 255 for b in whole[40:60]) + whole[60:]
        contents = {"cut": whole[:-200], "garbage": b"not packed", "flipped": flipped}
        packed.write_bytes(contents.get(damage, whole[:5]))
    with pytest.raises(UserError, match=r"rounds\.jsonl\.gz is damaged .*: restore it"):
        load_study(sweep)


@pytest.mark.parametrize("name", ["failed.json", "theory.json", "environment.json"])
@pytest.mark.parametrize("content", ["", "[1]", "null"])
def test_damaged_files_of_a_cell_are_named(sweep: Path, name: str, content: str) -> None:
    (sweep / "cells/digits-fedavg-0" / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name} .*restore or delete it"):
        load_study(sweep)


def test_a_failure_without_a_reason_is_still_one(sweep: Path) -> None:
    (sweep / "cells/digits-fedavg-0/failed.json").write_text("{}")
    (sweep / "cells/digits-fedavg-0/summary.json").unlink()
    assert load_study(sweep).cells[0].state == "failed"


@pytest.mark.parametrize(
    "content", [{"format": 1}, {"format": 1, "cells": [1]}, {"format": 1, "cells": [{}]}, [1], 3]
)
def test_damaged_studies_are_named(tmp_path: Path, content: object) -> None:
    file = tmp_path / "study.json.gz"
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(UserError, match=r"study\.json\.gz is (damaged|not a stored study)"):
        load_study(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.json.gz"
    file.write_text("not packed")
    with pytest.raises(UserError, match="not a stored study"):
        load_study(file)
    file.write_bytes(gzip.compress(json.dumps({"format": 99, "version": "9"}).encode()))
    with pytest.raises(UserError, match="format 99"):
        load_study(file)
    (tmp_path / "sweep.json").write_text("{")
    file.unlink()
    with pytest.raises(UserError, match="not valid JSON"):
        load_study(tmp_path)


def test_bits_come_back() -> None:
    rows = [[0, 12], [], [3]]
    assert unpack(pack(rows, 13), 3, 13) == rows


def test_rounds_with_attention_are_looked_at_first() -> None:
    records = records_of(0, 40, 20, 0.8, thinking=True)
    for record in records:
        if record["round"] % 10:
            del record["attention"]
    assert [m.round for m in trace_of(records, 20).moments] == [1, 11, 21, 31]
    records[0]["q"][0] = float("nan")
    records[10]["rejected"] = records[10]["visible"][:1]  # Q-values of others than those seen
    assert [m.round for m in trace_of(records, 20).moments] == [21, 31]


def test_a_run_of_another_version_is_refused(sweep: Path) -> None:
    config = sweep / "cells/digits-fedavg-0/config.toml"
    config.write_text("future_key = 1\n" + config.read_text())
    with pytest.raises(UserError, match=r"cannot be read by version .* 'future_key'"):
        load_study(sweep)
