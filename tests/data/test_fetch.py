import contextlib
import errno
import hashlib
import os
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_activities import har_members, zip_of

from fedglimpse.data import download as module
from fedglimpse.data import readers
from fedglimpse.data.download import download, fetch
from fedglimpse.errors import UserError
from fedglimpse.storage.lock import locked
from mistakes import mistake

CONTENT = bytes(i * 7 % 251 for i in range(700_000))
MD5 = hashlib.md5(CONTENT).hexdigest()
check = partial(module._check_md5, expected=MD5)
quick = partial(download, check=check, pause=0.01, timeout=2.0)


class Server:
    """A file server on the loopback that misbehaves as told."""

    def __init__(self):
        self.files = {"/file.bin": CONTENT}
        self.drop_after = []  # bytes after which each next answer is cut off
        self.ranges = True
        self.send_length = True
        self.failures = []  # status codes of the next answers
        self.stall = threading.Event()
        self.stalling = False
        self.requests = []  # (path, Range header)

    def answer(self, handler):
        self.requests.append((handler.path, handler.headers.get("Range")))
        if self.stalling:
            self.stall.wait(10)
            return
        body = self.files.get(handler.path)
        code = self.failures.pop(0) if self.failures else 404 if body is None else 200
        if code != 200:
            handler.send_error(code)
            return
        begin = handler.headers.get("Range") if self.ranges else None
        start = int(begin.removeprefix("bytes=").rstrip("-")) if begin else 0
        if start >= len(body) and begin:
            handler.send_error(416)
            return
        handler.send_response(206 if begin else 200)
        if begin:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if self.send_length:
            handler.send_header("Content-Length", str(len(body) - start))
        handler.end_headers()
        stop = start + self.drop_after.pop(0) if self.drop_after else len(body)
        handler.wfile.write(body[start:stop])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    file_server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(ConnectionError):
                file_server.answer(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    file_server.url = f"http://127.0.0.1:{http.server_port}"
    yield file_server
    file_server.stall.set()
    http.shutdown()
    http.server_close()
    thread.join(5)


def test_download_reports_progress_and_leaves_only_the_file(server, tmp_path):
    seen = []
    quick(
        f"{server.url}/file.bin",
        tmp_path / "new/file.bin",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (tmp_path / "new/file.bin").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file.bin"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_dropped_connections_are_resumed_with_range(server, tmp_path):
    server.drop_after = [300_000, 200_000]
    seen = []
    quick(
        f"{server.url}/file.bin",
        tmp_path / "file.bin",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [r for _, r in server.requests] == [None, "bytes=300000-", "bytes=500000-"]
    assert {total for _, total in seen} == {len(CONTENT)}


def test_an_earlier_part_is_continued(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert server.requests == [("/file.bin", "bytes=1000-")]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_complete_part_is_only_checked(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert len(server.requests) == 1
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_ignores_range_is_read_from_the_start(server, tmp_path):
    server.ranges = False
    server.drop_after = [300_000]
    seen = []
    quick(
        f"{server.url}/file.bin",
        tmp_path / "file.bin",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.requests) == 2
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_server_that_tells_no_length_is_fine(server, tmp_path):
    server.send_length = False
    seen = []
    quick(
        f"{server.url}/file.bin",
        tmp_path / "file.bin",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (len(CONTENT), None)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_server_errors_are_retried(server, tmp_path):
    server.failures = [503, 500]
    quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert len(server.requests) == 3


def test_giving_up_keeps_what_came(server, tmp_path):
    server.drop_after = [100_000] * 3
    with mistake():
        quick(f"{server.url}/file.bin", tmp_path / "file.bin", attempts=3)
    assert (tmp_path / "file.bin.part").stat().st_size == 300_000
    quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_stalled_server_times_out(server, tmp_path):
    server.stalling = True
    with mistake():
        quick(f"{server.url}/file.bin", tmp_path / "file.bin", attempts=2, timeout=0.2)


def test_nobody_listening(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with mistake():
        quick("http://127.0.0.1:9/file.bin", tmp_path / "file.bin", attempts=2)
    assert not list(tmp_path.iterdir())


def test_wrong_file_is_removed_and_nothing_else(server, tmp_path):
    server.files["/file.bin"] = b"something else"
    (tmp_path / "file.bin").write_bytes(b"an older one")
    (tmp_path / "other").write_bytes(b"mine")
    with pytest.raises(UserError) as caught:
        quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    for md5 in (MD5, hashlib.md5(b"something else").hexdigest()):
        assert md5 in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.bin", "other"]
    assert (tmp_path / "file.bin").read_bytes() == b"an older one"


def test_not_found_is_told_at_once(server, tmp_path):
    with mistake():
        quick(f"{server.url}/nowhere", tmp_path / "file.bin")
    assert len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told_and_the_part_kept(server, tmp_path, monkeypatch):
    written = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, chunk):
            self.file.write(chunk[:100])
            self.file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda self, mode="r": Full(written(self, mode)))
    with mistake():
        quick(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert len(server.requests) == 1  # not taken for a dropped connection
    assert (tmp_path / "file.bin.part").stat().st_size == 100


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with mistake():
        quick(f"{server.url}/file.bin", tmp_path / "file/file.bin")


def test_only_http_is_fetched(tmp_path):
    with mistake():
        quick("file:///etc/hosts", tmp_path / "file.bin")


@pytest.mark.parametrize("url", ["http://[bad", "http://..a"])
def test_an_address_that_cannot_be_one(url, tmp_path):
    with mistake():
        fetch("fashion", tmp_path, base_url=url)


def test_two_at_a_time_do_not_write_into_one_file(server, tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    with (
        locked(folder, "fetch of fashion"),
        pytest.raises(UserError, match=str(os.getpid())),
    ):
        fetch("fashion", tmp_path, base_url=server.url)
    assert list(folder.iterdir()) == []


def test_fetch_fashion_gets_four_files_and_keeps_intact_ones(server, tmp_path, monkeypatch):
    names = list(readers.FASHION_MD5)
    server.files = {f"/mirror/{name}": name.encode() * 50 for name in names}
    md5 = {name: hashlib.md5(name.encode() * 50).hexdigest() for name in names}
    remote = module._Remote("http://unused", "fashion-mnist", md5)
    monkeypatch.setitem(module._REMOTES, "fashion", remote)
    folder = fetch("fashion", tmp_path, base_url=f"{server.url}/mirror/")
    assert folder == tmp_path / "fashion-mnist"
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)
    (folder / names[2]).write_bytes(b"damaged")
    server.requests.clear()
    fetch("fashion", tmp_path, base_url=f"{server.url}/mirror")
    assert server.requests == [(f"/mirror/{names[2]}", None)]
    assert (folder / names[2]).read_bytes() == names[2].encode() * 50


def test_fetch_har_is_verified_by_structure_and_counts(server, tmp_path, monkeypatch):
    name = "human+activity+recognition+using+smartphones.zip"
    inner = zip_of({f"UCI HAR Dataset/{n}": text for n, text in har_members().items()})
    server.files = {f"/{name}": zip_of({"UCI HAR Dataset.zip": inner})}
    with mistake():
        fetch("har", tmp_path, base_url=server.url)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(readers, "HAR_COUNTS", (12, 6))
    assert fetch("har", tmp_path, base_url=server.url) == tmp_path / name
    server.files = {f"/{name}": b"<html>moved</html>"}
    (tmp_path / name).unlink()
    with mistake():
        fetch("har", tmp_path, base_url=server.url)


@pytest.mark.parametrize("name", ["digits", "hapt", "fashon"])
def test_names_that_cannot_be_fetched(name, tmp_path):
    with mistake():
        fetch(name, tmp_path)
