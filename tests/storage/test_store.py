"""The storage module: what is written is on the disk, and what is damaged is refused."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedglimpse.errors import UserError
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_warned", set())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of what was synced, in order."""
    names: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return names


def is_the_same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_file_and_its_folder_are_synced(tmp_path: Path, synced: list[str]) -> None:
    store.write(tmp_path / "a", b"one", b" two")
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert synced == [f"a.{os.getpid()}.part", tmp_path.name]


def test_a_new_folder_is_synced_into_its_parents(tmp_path: Path, synced: list[str]) -> None:
    store.make_folder(tmp_path / "a" / "b")
    assert synced == ["a", tmp_path.name]
    store.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_several_files_share_one_sync_of_the_folder(tmp_path: Path, synced: list[str]) -> None:
    store.commit(tmp_path, {"a": b"1", "b": b"2"})
    assert synced == ["manifest.json.part", "a.part", "b.part", tmp_path.name]
    assert store.read(tmp_path / "a") == b"1"


def test_the_manifest_knows_a_file_before_it_is_replaced(tmp_path: Path, synced: list[str]) -> None:
    store.commit(tmp_path, {"a": b"1"})
    synced.clear()
    store.commit(tmp_path, {"a": b"2"})
    assert synced == ["manifest.json.part", tmp_path.name, "a.part", tmp_path.name]
    (tmp_path / "a").write_bytes(b"1")  # as if the power was lost in between
    assert store.read(tmp_path / "a") == b"1"


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError("No space left on device")

    store.write(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["a", "manifest.json"])
def test_every_flipped_bit_of_a_file_or_its_manifest_is_noticed(tmp_path: Path, name: str) -> None:
    store.commit(tmp_path, {"a": b'{"x": 1}'})
    whole = (tmp_path / name).read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(flipped)
        if name == "manifest.json" and is_the_same(whole, bytes(flipped)):
            continue  # it differs in white space
        with pytest.raises(UserError, match=f"{name} is damaged"):
            store.read(tmp_path / "a")


def test_files_without_a_checksum_are_read_and_one_warning_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    with caplog.at_level(logging.WARNING, "fedglimpse"):
        assert store.read(tmp_path / "a") == b"1"
        assert store.read(tmp_path / "a") == b"1"
    assert [record.name for record in caplog.records] == ["fedglimpse"]
    store.commit(tmp_path, {"b": b"2"})
    assert store.read(tmp_path / "a") == b"1"  # beside a manifest that does not list it


def test_a_file_counts_as_committed_once_the_manifest_lists_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    assert store.is_committed(tmp_path / "a")  # of an older version
    store.commit(tmp_path, {"b": b"2"})
    assert not store.is_committed(tmp_path / "a")
    store.commit(tmp_path, {}, cover=["a", "missing"])
    assert store.is_committed(tmp_path / "a")
    assert not store.is_committed(tmp_path / "missing")


def test_covering_a_file_again_does_not_accept_what_happened_to_it(tmp_path: Path) -> None:
    store.commit(tmp_path, {"a": b"1"})
    (tmp_path / "a").write_bytes(b"2")
    store.commit(tmp_path, {"b": b"2"}, cover=["a"])
    with pytest.raises(UserError, match="a is damaged"):
        store.read(tmp_path / "a")
    store.commit(tmp_path, {}, forget=["a"])
    assert store.read(tmp_path / "a") == b"2"


def test_a_folder_is_checked_as_a_whole(tmp_path: Path) -> None:
    store.commit(tmp_path, {"a": b"1", "b": b"2"})
    assert store.check_folder(tmp_path) == 2
    (tmp_path / "a").unlink()  # what is missing is not damaged
    assert store.check_folder(tmp_path) == 2
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(UserError, match="b is damaged"):
        store.check_folder(tmp_path)


def test_every_flipped_bit_of_a_sealed_file_is_noticed(tmp_path: Path) -> None:
    content = torch_file({"a": 1})
    sealed = content + store.seal(content)
    path = tmp_path / "a.pt"
    for bit in range(0, 8 * len(sealed), 7):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"a\.pt is damaged"):
            store.unsealed(path)
    path.write_bytes(sealed)
    assert bytes(store.unsealed(path)) == content
    assert torch.load(path, weights_only=True) == {"a": 1}  # the seal is in nobody's way


def test_a_sealed_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    content = torch_file({"a": 1})
    sealed = content + store.seal(content)
    path = tmp_path / "a.pt"
    for length in range(0, len(sealed)):
        path.write_bytes(sealed[:length])
        if length == len(content):  # the file as an older version would have written it
            assert bytes(store.unsealed(path)) == content
            continue
        with pytest.raises(UserError, match=r"a\.pt is damaged"):
            store.unsealed(path)


def test_what_a_mark_counts_of_a_growing_file_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = store.GrowingFile(path)
    file.open({"bytes": 0})
    file.append(b"one\n")
    mark = file.mark()
    file.append(b"two\n")
    again = store.GrowingFile(path)
    again.open(mark)
    assert path.read_bytes() == b"one\n"
    again.append(b"three\n")
    assert store.GrowingFile(path).open(json.loads(json.dumps(again.mark()))) is None
    for damaged in (b"ome\nthree\n", b"on"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="lines is damaged"):
            store.GrowingFile(path).open(mark)
        assert path.read_bytes() == damaged


def test_a_growing_file_is_on_the_disk_where_it_is_marked(
    tmp_path: Path, synced: list[str]
) -> None:
    file = store.GrowingFile(tmp_path / "lines")
    file.append(b"one\n")
    assert not synced
    file.mark()
    assert synced == ["lines"]


def test_every_step_of_a_checkpoint_is_on_the_disk_before_the_next(
    tmp_path: Path, synced: list[str]
) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.prepare({"round": 1}, {"bytes": 0})
    assert synced == ["checkpoint.part", tmp_path.name]
    checkpoint.take_over()
    assert synced[2:] == [tmp_path.name]
    checkpoint.save({"round": 2}, {"bytes": 0})
    assert synced[3:] == ["checkpoint.part", tmp_path.name]
