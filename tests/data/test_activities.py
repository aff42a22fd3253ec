import io
import warnings
import zipfile

import numpy as np
import pytest
import torch

from fedglimpse.data import readers, sources
from mistakes import mistake


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return buffer.getvalue()


def har_members(train=12, test=6, features=561):
    generator = np.random.default_rng(0)
    members = {}
    for split, rows in (("train", train), ("test", test)):
        x = generator.uniform(-1, 1, (rows, features))
        lines = "\n".join(" " + "  ".join(f"{v: .7e}" for v in row) for row in x)
        members[f"{split}/X_{split}.txt"] = lines + "\n"
        members[f"{split}/y_{split}.txt"] = "\n".join(str(i % 6 + 1) for i in range(rows)) + "\n"
        members[f"{split}/subject_{split}.txt"] = "\n".join(str(i % 3 + 1) for i in range(rows))
    return members


def write_folder(folder, members):
    for name, text in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def small_har(monkeypatch):
    monkeypatch.setattr(readers, "HAR_COUNTS", (12, 6))
    return har_members()


@pytest.mark.parametrize("form", ["folder", "zip", "nested zip"])
def test_har_is_read_in_every_published_form(form, tmp_path, small_har):
    inner = {f"UCI HAR Dataset/{name}": text for name, text in small_har.items()}
    inner["__MACOSX/UCI HAR Dataset/train/X_train.txt"] = "junk"
    if form == "folder":
        write_folder(tmp_path / "UCI HAR Dataset", small_har)
    elif form == "zip":
        (tmp_path / "UCI HAR Dataset.zip").write_bytes(zip_of(inner))
    else:
        outer = zip_of({"UCI HAR Dataset.zip": zip_of(inner), "UCI HAR Dataset.names": b"x"})
        (tmp_path / "human+activity+recognition+using+smartphones.zip").write_bytes(outer)
    data = sources.load("har", tmp_path)
    assert data.label == "UCI-HAR"
    assert data.x_train.shape == (12, 561)
    assert data.x_train.dtype == torch.float32
    assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert data.subjects.tolist() == [1, 2, 3] * 4
    first = [float(v) for v in small_har["test/X_test.txt"].split("\n")[1].split()]
    assert torch.allclose(data.x_test[1], torch.tensor(first))
    assert sources.status("har", tmp_path).verified


def test_har_of_another_size_loads_with_a_warning_and_is_not_verified(tmp_path):
    write_folder(tmp_path / "UCI HAR Dataset", har_members())
    with pytest.warns(UserWarning, match="12 training and 6 test rows.*7352 and 2947"):
        sources.load("har", tmp_path)
    assert sources.status("har", tmp_path).verified is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train/X_train.txt", "1 2 3\n" * 12),
        ("train/y_train.txt", "1\n" * 11),
        ("train/subject_train.txt", "1\n" * 9),
        ("test/y_test.txt", "7\n" * 6),
        ("test/X_test.txt", "nan " * 561 + "\n" + ("0 " * 561 + "\n") * 5),
        ("test/X_test.txt", "oops\n"),
        ("test/X_test.txt", None),
    ],
)
def test_har_that_is_not_har_is_refused(name, text, tmp_path, small_har):
    folder = tmp_path / "UCI HAR Dataset"
    write_folder(folder, small_har)
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with mistake():
        sources.load("har", tmp_path)


def write_hapt(path, **changes):
    arrays = {
        "X": np.random.default_rng(0).normal(size=(10, 561)).astype(np.float32),
        "y": np.arange(10) % 6,
        "subject": np.arange(10) % 4 + 1,
        "is_train": np.arange(10) % 4 < 3,
    }
    np.savez(path, **{**arrays, **changes})


def test_hapt_is_split_by_subject_and_labelled_as_recomputed(tmp_path):
    write_hapt(tmp_path / "hapt561.npz")
    data = sources.load("hapt", tmp_path)
    assert data.label == "HAPT (recomputed)"
    assert (len(data.x_train), len(data.x_test)) == (8, 2)
    assert sorted(data.subjects.unique().tolist()) == [1, 2, 3]
    state = sources.status("hapt", tmp_path)
    assert state.verified is False
    assert readers.HAPT_SHA256 in state.detail


@pytest.mark.parametrize(
    "changes", [{"X": np.zeros((10, 7))}, {"y": np.arange(9)}, {"is_train": np.ones(4)}]
)
def test_hapt_of_wrong_shape_is_refused(changes, tmp_path):
    write_hapt(tmp_path / "hapt561.npz", **changes)
    with mistake():
        sources.load("hapt", tmp_path)


def test_damaged_archives_never_escape_as_other_errors(tmp_path, small_har):
    """Whatever happens to the bytes, the answer is data or a UserError."""
    write_hapt(tmp_path / "hapt561.npz")
    (tmp_path / "UCI HAR Dataset.zip").write_bytes(zip_of(small_har))
    generator = np.random.default_rng(1)
    for name, path in (
        ("hapt", tmp_path / "hapt561.npz"),
        ("har", tmp_path / "UCI HAR Dataset.zip"),
    ):
        original = path.read_bytes()
        for trial in range(25):
            damaged = bytearray(original)
            tail = range(len(damaged) - 600, len(damaged)) if trial % 2 else range(len(damaged))
            for at in generator.choice(tail, 5):
                damaged[at] ^= int(generator.integers(1, 256))
            if trial % 5 == 0:
                damaged = damaged[: generator.integers(1, len(damaged))]
            path.write_bytes(damaged)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = sources.status(name, tmp_path)
            assert state.present


@pytest.mark.skipif(sources.locate("hapt") is None, reason="the real file is not here")
def test_real_hapt():
    data = sources.load("hapt")
    assert data.x_train.shape == (7415, 561)
    assert len(data.subjects.unique()) == 21
    assert sources.status("hapt").verified
