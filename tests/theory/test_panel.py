"""From a run folder to theory.json, tables and the command."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fedglimpse.cli.results import run_folders, theory
from fedglimpse.theory.panel import Panel, measure_run, read_panel
from fedglimpse.theory.text import panel_text
from mistakes import mistake
from theory.small_run import run_with_models

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(theory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "glimpse"
    return run_with_models(path, method="glimpse", seeds=[0, 1])


@pytest.fixture(scope="module")
def panel(run: Path) -> Panel:
    return measure_run(run)


def test_the_panel_follows_every_lane_and_round(panel: Panel) -> None:
    assert [lane.seed for lane in panel.lanes] == [0, 1]
    for lane in panel.lanes:
        assert [p.round for p in lane.points] == [0, 1, 2, 3]
        assert lane.constants.rounds == 4
        assert lane.constants.ratio == pytest.approx(0.5)
        assert lane.constants.start == lane.points[0].loss
        assert lane.constants.gap == pytest.approx(sum(p.gap for p in lane.points) / 4)
        assert lane.constants.noise == max(p.noise for p in lane.points)
        assert lane.repaired.selection == pytest.approx(4 * lane.constants.deviation)
        assert all(p.delta_q is not None for p in lane.points)
    assert panel.lanes[0].points[0].loss != panel.lanes[1].points[0].loss


def test_measuring_twice_gives_the_same(run: Path, panel: Panel) -> None:
    assert measure_run(run) == panel


def test_theory_json_holds_the_series_and_comes_back(run: Path, panel: Panel) -> None:
    stored = json.loads((run / "theory.json").read_text())
    assert stored["lanes"][1]["series"]["deviation"] == [p.deviation for p in panel.lanes[1].points]
    assert stored["lanes"][0]["repaired"]["total"] == panel.lanes[0].repaired.total
    assert read_panel(run) == panel


def test_the_text_names_terms_and_q(panel: Panel) -> None:
    text = panel_text(panel)
    for word in ("Γ²", "Δ_Q", "L_Q", "visibility", "L k η", "4 models measured of 4 rounds"):
        assert word in text


def test_a_run_without_kept_models_is_measured_at_its_ends(tmp_path: Path) -> None:
    panel = measure_run(run_with_models(tmp_path / "a", every=0, method="fedavg"))
    assert [p.round for p in panel.lanes[0].points] == [0, 3]
    assert panel.lanes[0].q is None
    assert "keep_models" in panel.notes[0]
    with_models = measure_run(run_with_models(tmp_path / "b", method="fedavg"))
    assert panel.lanes[0].points[0] == with_models.lanes[0].points[0]


def test_one_run_prints_its_panel_with_fewer_examples(tmp_path: Path) -> None:
    run = run_with_models(tmp_path / "a", method="fedavg", rounds=1)
    result = CliRunner().invoke(app, [str(run), "--examples", "20"])
    assert result.exit_code == 0, result.output
    assert "‖∇F_C − ∇F_S‖²" in result.output
    assert "At most 20 examples" in result.output


def test_several_runs_print_a_rank_correlation(tmp_path: Path) -> None:
    for method in ("fedavg", "herd", "power-of-choice"):
        run_with_models(tmp_path / method, method=method, rounds=2)
    first = CliRunner().invoke(app, [str(tmp_path)])
    assert first.exit_code == 0, first.output
    assert "rank correlation" in first.output
    stored = tmp_path / "herd" / "theory.json"
    before = stored.stat().st_mtime_ns
    second = CliRunner().invoke(app, [str(tmp_path), "--reuse"])
    assert second.output == first.output
    assert stored.stat().st_mtime_ns == before


def test_a_folder_without_runs_is_a_users_mistake(tmp_path: Path) -> None:
    with mistake("RUNS"):
        run_folders([tmp_path])
    with mistake("RUNS"):
        run_folders([tmp_path / "missing"])


def test_a_run_without_any_model_is_a_users_mistake(tmp_path: Path) -> None:
    run = run_with_models(tmp_path / "a", every=0, method="fedavg")
    (run / "checkpoint.pt").unlink()
    with mistake("checkpoint.keep_models"):
        measure_run(run)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_is_a_users_mistake(tmp_path: Path, content: bytes | None) -> None:
    run = run_with_models(tmp_path / "a", every=0, method="fedavg", rounds=2)
    if content is None:
        torch.save({"lanes": [{}]}, run / "checkpoint.pt")
    else:
        (run / "checkpoint.pt").write_bytes(content)
    with mistake("--resume"):  # the records of an unfinished run are compared with it
        measure_run(run)


def test_a_panel_that_cannot_be_written_is_a_users_mistake(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "theory.json").unlink(missing_ok=True)
    (copy / "theory.json").mkdir()
    with mistake("--out"):
        measure_run(copy, max_examples=10)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"lanes": [{}]}'])
def test_a_damaged_panel_is_a_users_mistake(tmp_path: Path, content: str) -> None:
    (tmp_path / "theory.json").write_text(content)
    with mistake("--reuse"):
        read_panel(tmp_path)


def test_a_finished_cell_of_a_sweep_is_measured_like_its_run(tmp_path: Path) -> None:
    """A sweep packs the records of a finished cell and drops its checkpoint."""
    run = run_with_models(tmp_path / "a", method="fedavg", rounds=2)
    before = measure_run(run)
    rounds = run / "rounds.jsonl"
    (run / "rounds.jsonl.gz").write_bytes(gzip.compress(rounds.read_bytes()))
    rounds.unlink()
    (run / "checkpoint.pt").unlink()
    assert measure_run(run) == before
