"""Every fault that stored results have to survive, tried many times.

    python tests/faults/campaigns.py [--full] [--only WORD]     tries and failures, one line each

Each campaign returns its tries; the tests assert that none failed. A smaller `share` tries fewer
cases, the same ones each time. With PYTHONPATH=OTHER/src the campaigns try other code.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from unittest import mock

import power_loss
import torch
from power_loss import Journal, Loss, failing, losses, recorded
from runs_and_sweeps import (
    SWEEP,
    Tries,
    copied,
    refused,
    run_in,
    sweep_in,
    sweep_results,
)

from fedglimpse.agent.policy import read_policy, write_policy
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import RunFolder
from fedglimpse.storage.checkpoint import Checkpoint
from fedglimpse.studies.results.load import load_study

Campaign = Callable[[Path, float], Tries]


def sample(cases: list[Loss], share: float, seed: int = 0) -> list[Loss]:
    """Return a share of the cases, the same one each time."""
    if share >= 1:
        return cases
    return random.Random(seed).sample(cases, max(1, round(share * len(cases))))


# ---- Power loss.


def record_run(folder: Path) -> tuple[Journal, list[dict[str, object]]]:
    """Run undisturbed; return its journal, with a promise after every checkpoint, and records."""
    folder.mkdir(parents=True)
    with recorded(folder / "run") as journal:

        def promising(function: Callable[..., None]) -> Callable[..., None]:
            def call(self: RunFolder, *arguments: object) -> None:
                function(self, *arguments)
                state = Checkpoint(self.path).read()
                journal.promise(0 if state is None else state["round"])

            return call

        with mock.patch.multiple(
            RunFolder, save=promising(RunFolder.save), finish=promising(RunFolder.finish)
        ):
            records = run_in(folder / "run", resume=False)
    journal.promise("finished")
    return journal, records


def power_loss_in_a_run(tmp: Path, share: float) -> Tries:
    """Lose the power at file operations of a run, and resume it."""
    tries = Tries("power loss in a run")
    journal, expected = record_run(tmp / "whole")
    for loss in sample(losses(journal), share):
        folder = tmp / "cut" / "run"

        def check(loss: Loss = loss, folder: Path = folder) -> str:
            copied_state(journal, loss, folder)
            promises = journal.promises(loss)
            state = Checkpoint(folder).read() if folder.exists() else None
            round_num = 0 if state is None else state["round"]
            rounds = [promise for promise in promises if promise != "finished"]
            if round_num < max(rounds, default=0):
                return f"resumes from round {round_num}, though {max(rounds)} were saved"
            if "finished" in promises and not (folder / "summary.json").exists():
                return "a finished run lost its summary"
            return "" if run_in(folder) == expected else "other records"

        tries.attempt(loss, check)
    return tries


def power_loss_while_resuming(tmp: Path, share: float) -> Tries:
    """Lose the power while a run resumes that has lost the power before."""
    tries = Tries("power loss while resuming")
    journal, expected = record_run(tmp / "whole")
    halfway = Loss(len(journal.steps) * 2 // 3, "names alone")
    begin = tmp / "second" / "run"
    begin.parent.mkdir()
    copied_state(journal, halfway, begin)
    try:
        with recorded(begin) as second:
            run_in(begin)
    except UserError as error:
        tries.number = 1
        tries.failures.append(f"{halfway}: {error}")
        return tries
    for loss in sample(losses(second), share):
        folder = tmp / "cut" / "run"

        def check(loss: Loss = loss, folder: Path = folder) -> str:
            copied_state(second, loss, folder)
            return "" if run_in(folder) == expected else "other records"

        tries.attempt(loss, check)
    return tries


def copied_state(journal: Journal, loss: Loss, folder: Path) -> None:
    """Write what a disk may hold after a power loss into a folder that is made for it."""
    clear(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    journal.rebuild(loss, folder)


def clear(folder: Path) -> None:
    """Delete a folder if it exists."""
    shutil.rmtree(folder, ignore_errors=True)


def power_loss_in_a_sweep(tmp: Path, share: float) -> Tries:
    """Lose the power at file operations of a sweep with packs of two, and resume it."""
    tries = Tries("power loss in a sweep")
    file = tmp / "sweep.toml"
    file.write_text(SWEEP)
    (tmp / "whole").mkdir()
    with recorded(tmp / "whole" / "sweep") as journal:
        sweep_in(tmp / "whole" / "sweep", file)
    expected = sweep_results(tmp / "whole" / "sweep")
    for loss in sample(losses(journal), share):
        folder = tmp / "cut" / "sweep"

        def check(loss: Loss = loss, folder: Path = folder) -> str:
            copied_state(journal, loss, folder)
            if loss.steps == len(journal.steps):
                return "" if sweep_results(folder) == expected else "a finished sweep lost results"
            sweep_in(folder, file)
            return "" if sweep_results(folder) == expected else "other results"

        tries.attempt(loss, check)
    return tries


# ---- Damage.


def flips(path: Path, number: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield a file's content with one bit flipped, several times."""
    content = path.read_bytes()
    if not content:
        return
    generator = random.Random(f"{path.name} {seed}")
    for _ in range(number):
        position = generator.randrange(len(content))
        bit = generator.randrange(8)
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        yield f"{path.name}, bit {bit} of byte {position} flipped", bytes(flipped)


def cuts(path: Path, number: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the beginning of a file, several times; the first is empty."""
    content = path.read_bytes()
    generator = random.Random(f"{path.name} {seed}")
    lengths = [generator.randrange(len(content)) for _ in range(number - 1)] if content else []
    for length in [0, *lengths]:
        yield f"{path.name} cut after {length} of {len(content)} bytes", content[:length]


def damaged(
    tries: Tries,
    whole: Path,
    names: list[str],
    number: int,
    use: Callable[[Path], str],
) -> None:
    """Damage each of the files in copies of a folder; `use` may refuse it, but not be fooled."""
    for name in names:
        for kind in (flips, cuts):
            for case, content in kind(whole / name, number):
                folder = copied(whole, whole.parent / "damaged" / whole.name)
                (folder / name).write_bytes(content)

                def check(folder: Path = folder, name: str = name) -> str:
                    try:
                        return use(folder)
                    except UserError as error:
                        return refused(error, name, "manifest.json")

                tries.attempt(f"{case} in {whole.name}", check)


def names_in(folder: Path) -> list[str]:
    """Return the files of a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damage_in_an_unfinished_run(tmp: Path, share: float) -> Tries:
    """Resume a run with a damaged file: a refusal, or the same records."""
    tries = Tries("damage in an unfinished run")
    expected = run_in(tmp / "whole" / "run", resume=False)
    journal, _ = record_run(tmp / "journal")
    last_save = [i for i, step in enumerate(journal.steps) if step.kind == "promise"][1]
    folder = tmp / "begun" / "run"
    copied_state(journal, Loss(last_save + 1, "names alone"), folder)
    names = [name for name in names_in(folder) if not name.endswith((".lock", ".part"))]

    def use(folder: Path) -> str:
        return "" if run_in(folder) == expected else "other records"

    damaged(tries, folder, [n for n in names if "models" not in n], round(40 * share), use)
    return tries


def damage_in_a_finished_run(tmp: Path, share: float) -> Tries:
    """Report a run with a damaged file: a refusal, or the same study."""
    tries = Tries("damage in a finished run")
    whole = tmp / "whole" / "run"
    run_in(whole, resume=False)
    for name in ("checkpoint.pt",):  # which a report does not read
        (whole / name).unlink()
    expected = study_in(whole)
    names = [name for name in names_in(whole) if "models" not in name]

    def use(folder: Path) -> str:
        return "" if study_in(folder) == expected else "another study"

    damaged(tries, whole, names, round(40 * share), use)
    return tries


def damage_in_a_sweep(tmp: Path, share: float) -> Tries:
    """Resume and report a sweep with a damaged file: a refusal, or the same results."""
    tries = Tries("damage in a sweep")
    file = tmp / "sweep.toml"
    file.write_text(SWEEP)
    whole = tmp / "whole" / "sweep"
    sweep_in(whole, file)
    expected = sweep_results(whole)
    expected_study = study_in(whole)
    cell = sorted(expected)[1]
    names = [n for n in names_in(whole) if n.count("/") == 0 or n.startswith(f"cells/{cell}/")]

    def use(folder: Path) -> str:
        sweep_in(folder, file)
        if sweep_results(folder) != expected:
            return "other results"
        return "" if study_in(folder) == expected_study else "another study"

    damaged(tries, whole, names, round(25 * share), use)
    return tries


def study_in(folder: Path) -> str:
    """Return everything that a report knows of results, as text."""
    study = load_study(folder)
    for cell in study.cells:
        if cell.facts is None:
            raise UserError(f"{cell.id} has no results ({cell.reason})")
    text = repr(study)
    return text.replace(str(folder), "FOLDER").replace(folder.name, "NAME")


def damage_in_a_policy(tmp: Path, share: float) -> Tries:
    """Load a damaged policy: a refusal, or the same records."""
    tries = Tries("damage in a policy")
    whole = tmp / "whole" / "policies"
    run_in(whole.parent / "run", resume=False, agent__save=str(whole / "policy.pt"))

    def use(folder: Path) -> str:
        load = str(folder / "policy.pt")
        clear(tmp / "frozen")
        records = run_in(tmp / "frozen", False, agent__load=load, agent__frozen=True)
        return "" if records == expected else "other records"

    expected = run_in(
        tmp / "first", False, agent__load=str(whole / "policy.pt"), agent__frozen=True
    )
    damaged(tries, whole, ["policy.pt"], round(100 * share), use)
    return tries


def damage_in_kept_models(tmp: Path, share: float) -> Tries:
    """Read damaged models: a refusal, or the same numbers."""
    from fedglimpse.runs.kept_models import load_models

    tries = Tries("damage in kept models")
    whole = tmp / "whole" / "run"
    run_in(whole, resume=False)
    name = "models/round-000002.pt"
    expected = load_models(whole / name)

    def use(folder: Path) -> str:
        return "" if torch.equal(load_models(folder / name), expected) else "other models"

    damaged(tries, whole, [name], round(60 * share), use)
    return tries


# ---- Disks and clocks.


def failing_disk(tmp: Path, share: float) -> Tries:
    """Let a disk become full or read-only at file operations; then resume."""
    tries = Tries("full or read-only disk")
    expected = run_in(tmp / "whole" / "run", resume=False)
    with failing(tmp / "count", at=-1) as count:
        run_in(tmp / "count" / "run", resume=False)
    for number in (errno.ENOSPC, errno.EROFS):
        cases = list(range(count[0]))
        for at in cases[:: max(1, round(1 / share))]:
            folder = tmp / f"failing-{number}-{at}" / "run"

            def check(folder: Path = folder, at: int = at, number: int = number) -> str:
                problem = "it did not notice"
                try:
                    with failing(folder.parent, at, number):
                        run_in(folder, resume=False)
                except UserError as error:
                    problem = refused(error)
                if problem:
                    return problem
                return "" if run_in(folder) == expected else "other records"

            tries.attempt(f"{errno.errorcode[number]} after {at} operations", check)
    return tries


def clock_jumps(tmp: Path, share: float) -> Tries:
    """Set the clock to other years while a run goes on, and between two parts of it."""
    tries = Tries("clock jumps")
    expected = run_in(tmp / "whole" / "run", resume=False)
    generator = random.Random(0)
    real = time.time

    def jumping_time() -> float:
        return real() + generator.uniform(-1e9, 1e9)

    for number in range(max(2, round(20 * share))):
        folder = tmp / f"jump-{number}" / "run"

        def check(folder: Path = folder) -> str:
            with mock.patch("time.time", jumping_time):
                disk_is_full = failing(folder.parent, at=generator.randrange(20, 60))
                with disk_is_full, suppress(UserError):  # it is resumed
                    run_in(folder, resume=False)
                for path in folder.rglob("*"):
                    moment = generator.uniform(0, 4e9)
                    os.utime(path, (moment, moment))
                return "" if run_in(folder) == expected else "other records"

        tries.attempt(f"clock {number}", check)
    return tries


def two_processes(tmp: Path, share: float) -> Tries:
    """Resume a run that another process holds; write one policy from two processes at once."""
    tries = Tries("two processes")
    folder = tmp / "whole" / "run"
    expected = run_in(folder, resume=False)
    context = multiprocessing.get_context("fork")
    for number in range(max(1, round(5 * share))):
        ready = context.Event()
        owner = context.Process(target=hold, args=(folder, ready))
        owner.start()
        ready.wait(60)

        def check(owner: BaseProcess = owner) -> str:
            try:
                run_in(folder)
                problem = "it was not kept out"
            except UserError as error:
                problem = refused(error, f"process {owner.pid}")
            owner.kill()
            owner.join()
            return problem or ("" if run_in(folder) == expected else "other records")

        tries.attempt(f"second process {number}", check)
    path = str(tmp / "policy.pt")
    writers = [context.Process(target=write_often, args=(path, i, share)) for i in (0, 1)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if Path(path).exists():
            tries.attempt("policy while two write it", lambda: damage_of(path))
    for writer in writers:
        writer.join()
    tries.attempt("policy after two wrote it", lambda: damage_of(path))
    return tries


def hold(folder: Path, ready: Event) -> None:
    """Keep the lock of a run until this process is killed."""
    with RunFolder(folder).alone():
        ready.set()
        signal.pause()


def write_often(path: str, number: int, share: float) -> None:
    """Write a policy again and again."""
    for _ in range(max(3, round(40 * share))):
        policy = {"agent": {}, "network": torch.full((20_000,), number), "known_ids": number}
        write_policy(policy, path)


def damage_of(path: str) -> str:
    """Return what is wrong with a policy that is either of the two."""
    policy = read_policy(path)
    same = bool((policy["network"] == policy["known_ids"]).all())
    return "" if same else "it is a mixture"


CAMPAIGNS: tuple[Campaign, ...] = (
    power_loss_in_a_run,
    power_loss_while_resuming,
    power_loss_in_a_sweep,
    damage_in_an_unfinished_run,
    damage_in_a_finished_run,
    damage_in_a_sweep,
    damage_in_a_policy,
    damage_in_kept_models,
    failing_disk,
    clock_jumps,
    two_processes,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="try every case")
    parser.add_argument("--share", type=float, default=0.1, help="of the cases, without --full")
    parser.add_argument("--only", default="", help="campaigns with this word in their name")
    parser.add_argument("--show", type=int, default=3, help="failures to print")
    parser.add_argument("--mode", choices=power_loss.MODES, help="what a power loss leaves")
    arguments = parser.parse_args()
    if arguments.mode:
        power_loss.MODES = (arguments.mode,)
    failures = 0
    for campaign in CAMPAIGNS:
        if arguments.only not in campaign.__name__:
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            tries = campaign(Path(folder).resolve(), 1.0 if arguments.full else arguments.share)
        seconds = time.perf_counter() - began
        row = [tries.name, tries.number, len(tries.failures), f"{seconds:.0f} s"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        for failure in tries.failures[: arguments.show]:
            print(f"    {failure[:300]}")
        failures += len(tries.failures)
    print(json.dumps({"failures": failures}))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
