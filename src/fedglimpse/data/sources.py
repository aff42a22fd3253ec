"""Datasets by name: where their files lie, what they hold, whether they are intact."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data import readers
from fedglimpse.data.config import DATASETS
from fedglimpse.data.custom import is_own, load_own
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import stratified_sample
from fedglimpse.errors import UserError, nearest, require

_DIGITS_TEST_ROWS = 360

_kept: dict[str, Dataset] = {}  # those that this process need not load


@dataclass(frozen=True)
class SourceStatus:
    """What is known about the files of one dataset."""

    name: str
    present: bool
    path: Path | None  # None: nothing on disk is needed, or nothing was found
    verified: bool | None  # None: there is nothing to verify
    detail: str


@dataclass(frozen=True)
class _Files:
    """Where a dataset's files may lie (first match wins) and who reads them."""

    candidates: tuple[str, ...]  # relative to the data directory, or absolute
    members: tuple[str, ...]  # what a complete folder has
    read: Callable[[Path], Dataset]


_FILES = {
    "cifar10": _Files(
        ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
        tuple(readers.CIFAR10_MD5),
        readers.read_cifar10,
    ),
    "fashion": _Files(
        ("fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        tuple(readers.FASHION_MD5),
        readers.read_fashion,
    ),
    "har": _Files(
        (
            "UCI HAR Dataset",
            "UCI HAR Dataset.zip",
            "human+activity+recognition+using+smartphones.zip",
        ),
        readers.HAR_FILES,
        readers.read_har,
    ),
    "hapt": _Files(("hapt561.npz",), (), readers.read_hapt),
}


def data_directory(data_dir: str | Path | None = None) -> Path:
    """Return where datasets are kept: `data_dir`, else $FEDGLIMPSE_DATA, else the user's cache."""
    folder = data_dir or os.environ.get("FEDGLIMPSE_DATA")
    if folder:
        try:
            return Path(folder).expanduser()
        except RuntimeError:
            raise UserError(
                f"FEDGLIMPSE_DATA={folder} begins with a user who does not exist: write the full "
                "path."
            ) from None
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and Path(cache).is_absolute():  # the XDG specification ignores relative values
        return Path(cache) / "fedglimpse"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedglimpse"
    return Path.home() / ".cache" / "fedglimpse"


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a dataset of `DATASETS`, verifying its files, or a user's own.

    Args:
        name: which dataset, or "pkg.mod:factory", a callable without arguments.
        data_dir: where its files lie; `data_directory()` if not given.

    Raises:
        UserError: unknown name, missing files, files that are not the published ones, or own data
            that cannot be trained on.
    """
    if name in _kept and data_dir is None:
        return _kept[name]
    if is_own(name):
        return load_own(name)
    _check_name(name)
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic()
    path = locate(name, data_dir)
    if path is None:
        raise UserError(_missing(name, data_dir), key="data.name")
    dataset = _FILES[name].read(path)
    if name == "har" and not _has_har_counts(dataset):
        warnings.warn(_wrong_har_counts(path, dataset), stacklevel=2)
    return dataset


def keep(dataset: Dataset) -> None:
    """Let `load` return this dataset under its name from now on."""
    _kept[dataset.name] = dataset


def status(name: str, data_dir: str | Path | None = None) -> SourceStatus:
    """Look for a dataset's files and verify them by reading them; raises for no bad file."""
    _check_name(name)
    if name not in _FILES:
        origin = "bundled with scikit-learn" if name == "digits" else "generated from a fixed seed"
        return SourceStatus(name, True, None, None, f"{origin}, nothing to download")
    path = locate(name, data_dir)
    if path is None:
        return SourceStatus(name, False, None, None, _missing(name, data_dir))
    try:
        dataset = _FILES[name].read(path)
    except UserError as error:
        return SourceStatus(name, True, path, False, str(error))
    rows = f"{len(dataset.x_train)} training and {len(dataset.x_test)} test rows"
    if name == "har" and not _has_har_counts(dataset):
        return SourceStatus(name, True, path, False, _wrong_har_counts(path, dataset))
    if name == "hapt":
        sha256 = readers.file_digest(path, "sha256")
        if sha256 != readers.HAPT_SHA256:
            detail = f"{rows}, but sha256 is {sha256}, expected {readers.HAPT_SHA256}"
            return SourceStatus(name, True, path, False, detail)
    proof = "row counts match" if name == "har" else "checksums match"
    return SourceStatus(name, True, path, True, f"{rows}, {proof}")


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the first complete copy of a dataset's files, else the first partial, else None."""
    files = _FILES[name]
    base = data_directory(data_dir)
    partial = None
    try:
        for candidate in files.candidates:
            path = base / candidate
            if path.is_file() or _has_members(path, files.members):
                return path
            if partial is None and path.is_dir() and any(path.iterdir()):
                partial = path
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}): fix access, or set "
            "FEDGLIMPSE_DATA to another folder."
        ) from None
    return partial


def _has_members(folder: Path, members: tuple[str, ...]) -> bool:
    return folder.is_dir() and all((folder / name).is_file() for name in members)


def digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, split 1,437 / 360."""
    table = _digits_table()
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8)  # 0..16 -> 0..255
    x = torch.from_numpy(images).view(-1, 1, 8, 8)  # [1797, 1, 8, 8]
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    test, train = stratified_sample(y, _DIGITS_TEST_ROWS, rng.generator(0, "digits"))
    return Dataset("digits", "Digits", x[train], y[train], x[test], y[test], num_classes=10)


def _digits_table() -> np.ndarray:
    """Return the rows of scikit-learn's digits: 64 pixels and the label.  # [1797, 65].

    Its file is read here, because importing scikit-learn takes longer than ten rounds on digits.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # another version may keep it elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def synthetic(
    num_train: int = 4000,
    num_test: int = 1000,
    num_features: int = 32,
    num_classes: int = 10,
    seed: int = 0,
) -> Dataset:
    """Generate classification data: three Gaussian clusters a class, bent by a random network.

    The clusters of a class lie apart in a small latent space, so that a linear model is clearly
    worse than a small network and neither is perfect.
    """
    require(
        min(num_train, num_test, num_features) >= 1 and num_classes >= 2,
        f"Synthetic data needs rows, features and two classes, but has {num_train=}, {num_test=}, "
        f"{num_features=}, {num_classes=}: use larger numbers.",
    )
    num_clusters = 3
    latent = 8
    generator = rng.generator(seed, "synthetic")
    centres = 1.5 * torch.randn(num_classes, num_clusters, latent, generator=generator)
    inner = torch.randn(latent, 2 * num_features, generator=generator) / latent**0.5
    outer = torch.randn(2 * num_features, num_features, generator=generator) / num_features**0.5

    def draw_rows(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randperm(count, generator=generator) % num_classes
        cluster = torch.randint(num_clusters, (count,), generator=generator)
        spread = 0.6 * torch.randn(count, latent, generator=generator)
        clean = torch.sin((centres[y, cluster] + spread) @ inner) @ outer
        noise = 0.2 * torch.randn(count, num_features, generator=generator)
        return clean + noise, y

    x_train, y_train = draw_rows(num_train)
    x_test, y_test = draw_rows(num_test)
    return Dataset("synthetic", "Synthetic", x_train, y_train, x_test, y_test, num_classes)


def _check_name(name: str) -> None:
    require(
        name in DATASETS,
        f"Unknown dataset '{name}'.{nearest(name, DATASETS)} Choose one of {', '.join(DATASETS)}, "
        "or your own as 'pkg.mod:factory'.",
        key="data.name",
    )


def _missing(name: str, data_dir: str | Path | None) -> str:
    base = data_directory(data_dir)
    paths = " and ".join(str(base / candidate) for candidate in _FILES[name].candidates)
    remedy = readers.remedy(name)
    if name == "hapt":
        remedy = (
            f"it has no automatic download: place 'hapt561.npz' (arrays X, y, subject, is_train) "
            f"in {base}"
        )
    return f"'{name}' was not found in {paths}; {remedy}, or set FEDGLIMPSE_DATA."


def _has_har_counts(dataset: Dataset) -> bool:
    return (len(dataset.x_train), len(dataset.x_test)) == readers.HAR_COUNTS


def _wrong_har_counts(path: Path, dataset: Dataset) -> str:
    train, test = readers.HAR_COUNTS
    return (
        f"{path} has {len(dataset.x_train)} training and {len(dataset.x_test)} test rows, the "
        f"official release has {train} and {test}; {readers.remedy('har')} for the official files."
    )
