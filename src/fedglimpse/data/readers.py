"""The files that the datasets are published in: their checksums and how they are read."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError, require

CIFAR10_MD5 = {  # members of the official cifar-10-binary.tar.gz
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
# Of the unpacked content: Debian repacks the same bytes under another gzip header, so the md5 of
# the .gz differs between the official download and /usr/share/datasets.
FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte.gz": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte.gz": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte.gz": "15d484375f8d13e6eb1aabb0c3f46965",
}
HAR_FILES = (
    "train/X_train.txt",
    "train/y_train.txt",
    "train/subject_train.txt",
    "test/X_test.txt",
    "test/y_test.txt",
    "test/subject_test.txt",
)
HAR_COUNTS = (7352, 2947)  # training and test rows of the official release
HAPT_SHA256 = "fab562566c07d5d730093cb50cc758006c5b7be3fbffcd9d32ab36b829f6e97f"

_NUM_FEATURES = 561
_NUM_ACTIVITIES = 6
_BROKEN = (  # what readers raise on damaged files
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


def file_digest(path: Path, algorithm: str) -> str:
    """Return the checksum of a file, reading it in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def read_cifar10(path: Path) -> Dataset:
    """Read the folder `cifar-10-batches-bin` or `cifar-10-binary.tar.gz`, checking every md5."""
    raw = _read_folder(path, CIFAR10_MD5, "cifar10") if path.is_dir() else _read_tar(path)
    batches = []
    for name, md5 in CIFAR10_MD5.items():
        _check_md5(path / name, raw[name], md5, "cifar10")
        batches.append(np.frombuffer(raw[name], dtype=np.uint8).reshape(-1, 3073))
    x_train, y_train = _images_and_labels(batches[:5])
    x_test, y_test = _images_and_labels(batches[5:])
    return Dataset("cifar10", "CIFAR-10", x_train, y_train, x_test, y_test, num_classes=10)


def _images_and_labels(batches: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Split rows of CIFAR-10, a label and the image behind it."""
    rows = np.concatenate(batches)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).copy()
    labels = rows[:, 0].astype(np.int64)
    return torch.from_numpy(images), torch.from_numpy(labels)


def read_fashion(path: Path) -> Dataset:
    """Read the four idx files in a folder, checking the md5 of what they contain."""
    compressed = _read_folder(path, FASHION_MD5, "fashion")
    arrays = []
    for name, md5 in FASHION_MD5.items():
        try:
            raw = gzip.decompress(compressed[name])
        except _BROKEN as error:
            raise _unreadable(path / name, error, "fashion") from error
        _check_md5(path / name, raw, md5, "fashion")
        arrays.append(torch.from_numpy(parse_idx(raw, str(path / name))))
    train, train_labels, test, test_labels = arrays
    return Dataset(
        "fashion",
        "Fashion-MNIST",
        train[:, None],  # [60000, 1, 28, 28]
        train_labels.long(),
        test[:, None],
        test_labels.long(),
        num_classes=10,
    )


def parse_idx(raw: bytes, file: str) -> np.ndarray:
    """Decode the idx format of unsigned bytes: 0, 0, 8, rank, big-endian sizes, values."""
    require(
        len(raw) >= 4 and raw[:3] == b"\0\0\x08",
        f"{file} is not an idx file of bytes: it starts with {raw[:4].hex() or 'nothing'}, "
        "expected 000008; replace it with the official file.",
    )
    rank = raw[3]
    start = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", raw[4:start]) if len(raw) >= start else ()
    require(
        len(shape) == rank and len(raw) - start == math.prod(shape),
        f"{file} holds {max(0, len(raw) - start)} values but its header says {shape}; replace it "
        "with the official file.",
    )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()


def read_har(path: Path) -> Dataset:
    """Read the folder `UCI HAR Dataset`, its zip, or the UCI archive that holds that zip."""
    tables: dict[str, np.ndarray] = {}
    try:
        read_member = _har_folder(path) if path.is_dir() else _har_zip(path.read_bytes())
        for name in HAR_FILES:
            tables[name] = np.loadtxt(io.BytesIO(read_member(name)), ndmin=2)
    except _BROKEN as error:
        raise _unreadable(path, error, "har") from error
    x_train = tables["train/X_train.txt"]
    y_train = tables["train/y_train.txt"][:, 0] - 1
    x_test = tables["test/X_test.txt"]
    y_test = tables["test/y_test.txt"][:, 0] - 1
    subjects = tables["train/subject_train.txt"][:, 0]
    _check_features(path, x_train, y_train, "har", subjects)
    _check_features(path, x_test, y_test, "har")
    return _activities("har", "UCI-HAR", x_train, y_train, x_test, y_test, subjects)


def read_hapt(path: Path) -> Dataset:
    """Read `hapt561.npz`: X, y, subject and is_train; the official split by subject."""
    try:
        with np.load(path, allow_pickle=False) as file:
            x = file["X"]
            y = file["y"]
            subjects = file["subject"]
            train = file["is_train"].astype(bool)
        _check_features(path, x, y, "hapt", subjects)
        test = ~train
        split = (x[train], y[train], x[test], y[test], subjects[train])
    except (*_BROKEN, IndexError) as error:
        raise _unreadable(path, error, "hapt") from error
    return _activities("hapt", "HAPT (recomputed)", *split)


def remedy(name: str) -> str:
    """Return what brings the files of a dataset back, for the end of an error sentence."""
    if name == "hapt":
        return (
            "place a good 'hapt561.npz' (arrays X, y, subject, is_train) in the data directory, "
            "it has no automatic download"
        )
    return f"run `fedglimpse data fetch {name}`"


def _activities(
    name: str,
    label: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    subjects: np.ndarray,
) -> Dataset:
    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))

    return Dataset(
        name,
        label,
        tensor(x_train, np.float32),
        tensor(y_train, np.int64),
        tensor(x_test, np.float32),
        tensor(y_test, np.int64),
        _NUM_ACTIVITIES,
        tensor(subjects, np.int64),
    )


def _check_features(
    path: Path, x: np.ndarray, y: np.ndarray, name: str, subjects: np.ndarray | None = None
) -> None:
    problem = ""
    if x.ndim != 2 or x.shape[1] != _NUM_FEATURES:
        problem = f"features have shape {x.shape}, expected (rows, {_NUM_FEATURES})"
    elif len(y) != len(x) or (subjects is not None and len(subjects) != len(x)):
        problem = f"{len(x)} feature rows but {len(y)} labels"
        if subjects is not None:
            problem += f" and {len(subjects)} subjects"
    elif not np.isfinite(x).all():
        problem = "some features are not finite"
    elif len(y) and not (y.min() >= 0 and y.max() < _NUM_ACTIVITIES):
        problem = f"activities run from {y.min():g} to {y.max():g}, expected 6, the first as 0"
    require(not problem, f"{path} is not the expected data: {problem}; {remedy(name)}.")


def _har_folder(path: Path) -> Callable[[str], bytes]:
    return lambda name: (path / name).read_bytes()


def _har_zip(raw: bytes) -> Callable[[str], bytes]:
    archive = zipfile.ZipFile(io.BytesIO(raw))
    names = [name for name in archive.namelist() if not name.startswith("__MACOSX")]
    for name in names:
        if PurePosixPath(name).name == "UCI HAR Dataset.zip":
            return _har_zip(archive.read(name))

    def read_member(member: str) -> bytes:
        for name in names:
            if name == member or name.endswith("/" + member):
                return archive.read(name)
        raise KeyError(f"no member {member}")

    return read_member


def _read_folder(path: Path, names: dict[str, str], source: str) -> dict[str, bytes]:
    missing = [name for name in names if not (path / name).is_file()]
    require(
        not missing,
        f"{path} is incomplete, it lacks {', '.join(missing)}; delete it and {remedy(source)}.",
    )
    try:
        return {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise _unreadable(path, error, source) from error


def _read_tar(path: Path) -> dict[str, bytes]:
    raw: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                name = PurePosixPath(member.name).name
                if file is not None and name in CIFAR10_MD5:
                    raw[name] = file.read()
    except _BROKEN as error:
        raise _unreadable(path, error, "cifar10") from error
    missing = [name for name in CIFAR10_MD5 if name not in raw]
    if missing:
        raise _unreadable(path, KeyError(f"no member {', '.join(missing)}"), "cifar10")
    return raw


def _check_md5(path: Path, raw: bytes, expected: str, source: str) -> None:
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    require(
        md5 == expected,
        f"{path} is corrupt: its md5 is {md5}, expected {expected}; delete it and "
        f"{remedy(source)}.",
    )


def _unreadable(path: Path, error: Exception, source: str) -> UserError:
    """Return the error about a damaged file of a dataset."""
    reason = str(error).strip("'\"") or type(error).__name__
    return UserError(f"{path} cannot be read ({reason}); delete it and {remedy(source)}.")
