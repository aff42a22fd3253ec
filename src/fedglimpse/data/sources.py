"""Datasets by name: where their files lie, what they hold, whether they are intact."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data import readers as official
from fedglimpse.data.custom import is_own, load_own
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import stratified_sample
from fedglimpse.errors import UserError, nearest

NAMES = ("digits", "synthetic", "cifar10", "fashion", "har", "hapt")

_DIGITS_TEST_ROWS = 360


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
        tuple(official.CIFAR10_MD5),
        official.read_cifar10,
    ),
    "fashion": _Files(
        ("fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        tuple(official.FASHION_MD5),
        official.read_fashion,
    ),
    "har": _Files(
        (
            "UCI HAR Dataset",
            "UCI HAR Dataset.zip",
            "human+activity+recognition+using+smartphones.zip",
        ),
        official.HAR_FILES,
        official.read_har,
    ),
    "hapt": _Files(("hapt561.npz",), (), official.read_hapt),
}


def data_directory(data_dir: str | Path | None = None) -> Path:
    """Return where datasets are kept: `data_dir`, else $FEDGLIMPSE_DATA, else the user's cache."""
    chosen = data_dir or os.environ.get("FEDGLIMPSE_DATA")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise UserError(
                f"FEDGLIMPSE_DATA={chosen} begins with a user that is not there; write the whole "
                "path"
            ) from None
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and Path(cache).is_absolute():  # the XDG specification ignores relative values
        return Path(cache) / "fedglimpse"
    home = Path.home()
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "fedglimpse"


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a dataset of `NAMES`, verifying its files, or a user's own.

    Args:
        name: which dataset, or "pkg.mod:factory", a callable without arguments.
        data_dir: where its files lie; `data_directory()` if not given.

    Raises:
        UserError: unknown name, missing files, files that are not the published ones, or own data
            that cannot be trained on.
    """
    if is_own(name):
        return load_own(name)
    _check_name(name)
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic()
    path = locate(name, data_dir)
    if path is None:
        raise UserError(_missing(name, data_dir))
    dataset = _FILES[name].read(path)
    counts = (len(dataset.x_train), len(dataset.x_test))
    if name == "har" and counts != official.HAR_COUNTS:
        warnings.warn(_har_counts(path, counts), stacklevel=2)
    return dataset


def status(name: str, data_dir: str | Path | None = None) -> SourceStatus:
    """Look for a dataset's files and verify them by reading them; raises for no bad file."""
    _check_name(name)
    if name not in _FILES:
        made = "bundled with scikit-learn" if name == "digits" else "generated from a fixed seed"
        return SourceStatus(name, True, None, None, f"{made}, nothing to download")
    path = locate(name, data_dir)
    if path is None:
        return SourceStatus(name, False, None, None, _missing(name, data_dir))
    try:
        dataset = _FILES[name].read(path)
    except UserError as error:
        return SourceStatus(name, True, path, False, str(error))
    counts = (len(dataset.x_train), len(dataset.x_test))
    rows = f"{counts[0]} training and {counts[1]} test rows"
    if name == "har" and counts != official.HAR_COUNTS:
        return SourceStatus(name, True, path, False, _har_counts(path, counts))
    if name == "hapt":
        found = official.file_digest(path, "sha256")
        if found != official.HAPT_SHA256:
            detail = f"{rows}, but sha256 is {found}, expected {official.HAPT_SHA256}"
            return SourceStatus(name, True, path, False, detail)
    proof = "row counts match" if name == "har" else "checksums match"
    return SourceStatus(name, True, path, True, f"{rows}, {proof}")


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the first complete place of a dataset's files, else the first partial, else None."""
    files = _FILES[name]
    places = [data_directory(data_dir) / candidate for candidate in files.candidates]
    try:
        present = [p for p in places if p.is_file() or (p.is_dir() and any(p.iterdir()))]
        complete = [
            p for p in present if p.is_file() or all((p / m).is_file() for m in files.members)
        ]
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}); mend access, or set "
            "FEDGLIMPSE_DATA to another folder"
        ) from None
    return next(iter(complete + present), None)


def digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, split 1,437 / 360."""
    from sklearn.datasets import load_digits  # slow to import, needed only here

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # 0..16 -> 0..255
    x = torch.from_numpy(images)[:, None]  # [1797, 1, 8, 8]
    y = torch.from_numpy(bunch.target.astype(np.int64))
    test, train = stratified_sample(y, _DIGITS_TEST_ROWS, rng.generator(0, "digits"))
    return Dataset("digits", "Digits", x[train], y[train], x[test], y[test], num_classes=10)


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
    if min(num_train, num_test, num_features) < 1 or num_classes < 2:
        raise UserError(
            f"synthetic data needs rows, features and two classes, got {num_train=}, {num_test=}, "
            f"{num_features=}, {num_classes=}; ask for larger numbers"
        )
    clusters, latent = 3, 8
    draw = rng.generator(seed, "synthetic")
    centres = 1.5 * torch.randn(num_classes, clusters, latent, generator=draw)
    inner = torch.randn(latent, 2 * num_features, generator=draw) / latent**0.5
    outer = torch.randn(2 * num_features, num_features, generator=draw) / num_features**0.5

    def rows(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randperm(count, generator=draw) % num_classes
        which = torch.randint(clusters, (count,), generator=draw)
        z = centres[y, which] + 0.6 * torch.randn(count, latent, generator=draw)  # [count, latent]
        clean = torch.sin(z @ inner) @ outer
        return clean + 0.2 * torch.randn(count, num_features, generator=draw), y

    train, test = rows(num_train), rows(num_test)
    return Dataset("synthetic", "Synthetic", *train, *test, num_classes=num_classes)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise UserError(
            f"unknown dataset '{name}'.{nearest(name, NAMES)} Choose one of {', '.join(NAMES)}, or "
            "your own as 'pkg.mod:factory'"
        )


def _missing(name: str, data_dir: str | Path | None) -> str:
    base = data_directory(data_dir)
    looked = " and ".join(str(base / candidate) for candidate in _FILES[name].candidates)
    if name == "hapt":
        return (
            f"'hapt' was not found, looked for {looked}; it has no automatic download: place "
            f"'hapt561.npz' (arrays X, y, subject, is_train) in {base}, or set FEDGLIMPSE_DATA"
        )
    return (
        f"'{name}' was not found, looked for {looked}; "
        f"{official.remedy(name)}, or set FEDGLIMPSE_DATA"
    )


def _har_counts(path: Path, counts: tuple[int, int]) -> str:
    expected = official.HAR_COUNTS
    return (
        f"{path} has {counts[0]} training and {counts[1]} test rows, the official release has "
        f"{expected[0]} and {expected[1]}; {official.remedy('har')} for the official files"
    )
