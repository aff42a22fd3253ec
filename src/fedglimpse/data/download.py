"""Download datasets from their official addresses: resumable, verified, atomic."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from fedglimpse.data import readers
from fedglimpse.data.config import DATASETS
from fedglimpse.data.sources import data_directory
from fedglimpse.errors import UserError, nearest, require
from fedglimpse.storage.lock import locked

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all (None: unknown)

_CHUNK = 1 << 18


@dataclass(frozen=True)
class _Remote:
    """What to download for one dataset."""

    base_url: str
    folder: str  # inside the data directory
    md5: dict[str, str]  # file name -> md5, "" if none is published


_REMOTES = {
    "cifar10": _Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
    "fashion": _Remote(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "har": _Remote(
        "https://archive.ics.uci.edu/static/public/240/",
        "",
        {"human+activity+recognition+using+smartphones.zip": ""},
    ),
}
FETCHABLE = tuple(_REMOTES)


class _Dropped(Exception):
    """The connection failed, and another attempt may succeed."""


def fetch(
    name: str,
    data_dir: str | Path | None = None,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a dataset and return the file, or the folder of its files.

    Intact files are not downloaded again. UCI-HAR has no published checksum; its archive is
    verified by structure and row counts.

    Args:
        name: one of `FETCHABLE`.
        data_dir: where to put it; `data_directory()` if not given.
        base_url: a mirror's folder instead of the official one.
        progress: called with (bytes done, bytes in all or None) of the current file.

    Raises:
        UserError: nothing to download, no connection, a wrong file, or a full disk.
    """
    require(
        name in DATASETS,
        f"Unknown dataset '{name}'.{nearest(name, DATASETS)} Choose one of {', '.join(FETCHABLE)}.",
    )
    require(name != "hapt", f"'hapt' cannot be fetched; {readers.remedy('hapt')}.")
    require(name in _REMOTES, f"'{name}' needs no download: use it directly.")
    remote = _REMOTES[name]
    folder = data_directory(data_dir) / remote.folder
    base = (base_url or remote.base_url).rstrip("/")
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, f"fetch of {name}", "set FEDGLIMPSE_DATA to another folder"):
        for filename, md5 in remote.md5.items():
            target = folder / filename
            check = partial(_check_md5, expected=md5) if md5 else _check_har
            if not _intact(target, check):
                download(f"{base}/{filename}", target, check, progress)
    return folder if remote.folder else target


def download(
    url: str,
    target: Path,
    check: Callable[[Path], None],
    progress: Progress | None = None,
    *,
    attempts: int = 4,
    pause: float = 1.0,
    timeout: float = 30.0,
) -> None:
    """Download `url` into `target`, resuming an earlier attempt.

    The bytes gather in `target` + ".part"; `target` appears only when complete and checked.

    Args:
        url: http or https address.
        target: the file to make.
        check: raises UserError when the file is not the right one.
        progress: called with (bytes done, bytes in all or None).
        attempts: how often to connect before giving up.
        pause: seconds before the second attempt, doubled for each further one.
        timeout: seconds without a byte after which a connection counts as dropped.
    """
    require(
        url.startswith(("http://", "https://")),
        f"Cannot download '{url}': give an http:// or https:// address.",
    )
    incomplete = target.with_name(target.name + ".part")
    for attempt in range(1, attempts + 1):
        try:
            with _disk_errors(incomplete):
                incomplete.parent.mkdir(parents=True, exist_ok=True)
                _transfer(url, incomplete, progress, timeout)
            break
        except _Dropped as error:
            if attempt == attempts:
                size = incomplete.stat().st_size if incomplete.exists() else 0
                raise UserError(
                    f"Download of {url} failed {attempts} times ({error}), {size} bytes were kept: "
                    "check the connection and rerun the command to resume."
                ) from error
            time.sleep(pause * 2 ** (attempt - 1))
    try:
        check(incomplete)
    except UserError as error:
        incomplete.unlink()
        raise UserError(f"{url} gave a wrong file: {error}") from error
    with _disk_errors(target):
        incomplete.replace(target)


def _transfer(url: str, incomplete: Path, progress: Progress | None, timeout: float) -> None:
    """Append the missing bytes to a file, or start again if the server cannot resume."""
    size = incomplete.stat().st_size if incomplete.exists() else 0
    with _network_errors():
        response = _open(url, size, timeout)
    if response is None:  # no bytes are missing; the check decides if they are right
        return
    with response:
        resumes = _resumes_at(response, size)
        done = size if resumes else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdigit() else None
        with incomplete.open("ab" if resumes else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                file.flush()
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    if total is not None and done < total:
        raise _Dropped(f"the connection closed after {done} of {total} bytes")


def _open(url: str, first_byte: int, timeout: float) -> http.client.HTTPResponse | None:
    """Request the bytes from `first_byte` on; None when the server has none there."""
    headers = {"User-Agent": "fedglimpse", "Accept-Encoding": "identity"}
    if first_byte:
        headers["Range"] = f"bytes={first_byte}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        return response
    except ValueError as error:  # raised before a byte is sent
        raise UserError(f"'{url}' is no address ({error}): correct the mirror's address.") from None
    except urllib.error.HTTPError as error:
        error.close()
        answer = f"{error.code} {error.reason}"
        if error.code == 416 and first_byte:
            return None
        if error.code >= 500 or error.code in (408, 429):
            raise _Dropped(f"the server answered {answer}") from error
        raise UserError(
            f"The server answered {answer} for {url}: check the address, or download the file "
            "elsewhere and place it in the data directory."
        ) from error


def _resumes_at(response: http.client.HTTPResponse, first_byte: int) -> bool:
    content_range = response.headers.get("Content-Range", "")
    begins_there = content_range.startswith(f"bytes {first_byte}-")
    return first_byte > 0 and response.status == 206 and begins_there


def _chunks(response: IO[bytes]) -> Iterator[bytes]:
    while True:
        with _network_errors():
            chunk = response.read(_CHUNK)
        if not chunk:
            return
        yield chunk


@contextmanager
def _network_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _Dropped(str(error) or type(error).__name__) from error


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn OSError into a sentence about the disk; those of the network were caught before."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write {path} ({error.strerror or error}): free some space or set "
            "FEDGLIMPSE_DATA to a folder that can be written, then rerun the command."
        ) from error


def _intact(target: Path, check: Callable[[Path], None]) -> bool:
    if not target.is_file():
        return False
    try:
        check(target)
    except (UserError, OSError):
        return False
    return True


def _check_md5(path: Path, expected: str) -> None:
    md5 = readers.file_digest(path, "md5")
    require(
        md5 == expected,
        f"its md5 is {md5}, expected {expected}; it was removed, try again or from a mirror.",
    )


def _check_har(path: Path) -> None:
    dataset = readers.read_har(path)
    counts = (len(dataset.x_train), len(dataset.x_test))
    require(
        counts == readers.HAR_COUNTS,
        f"it has {counts} training and test rows, expected {readers.HAR_COUNTS}; it was removed, "
        "rerun the command or try a mirror.",
    )
