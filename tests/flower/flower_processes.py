"""Real Flower processes on loopback: a SuperLink, SuperNodes, TLS, keys; killed at the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from node_keys import write_certificates, write_key

from fedglimpse.version import VERSION

BIN = Path(sys.executable).parent
APP = Path(__file__).parents[2] / "examples" / "flower_app"
SOURCE = Path(__file__).parents[2] / "src"


def quiet_environment(home: Path) -> dict[str, str]:
    """No telemetry, no update check, no installation, one thread for each process."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def slowness() -> float:
    """Return how much slower than an idle machine this one starts Python, at least 1.

    Every message to a client starts a process, so that timeouts must grow with it.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return max(1.0, (time.monotonic() - began) / 2.5)


def wait_for(what: str, ready: Callable[[], Any], seconds: float) -> Any:
    """Poll until `ready` returns something true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {seconds} s")


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that we started, and everything it started."""
    kill(tree(process.pid))
    process.wait(timeout=20)


class Cluster:
    """A federation of processes, secured with TLS and SuperNode keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.environment = quiet_environment(folder / "home")
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.closed = False
        (folder / "home").mkdir(parents=True)
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )
        write_certificates(folder)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        for process in reversed(self.processes):
            if process.poll() is None:
                kill_tree(process)
        kill(self.orphans())

    def orphans(self) -> list[int]:
        """Return processes of this cluster whose parent is gone: all know its home by name."""
        mark, found = f"FLWR_HOME={self.folder / 'home'}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def spawn(
        self, name: str, words: Sequence[str], source: Path = SOURCE
    ) -> subprocess.Popen[bytes]:
        """Start a program in the background, its output in a file; the library is in `source`."""
        if self.closed:
            raise RuntimeError("the cluster is closed")
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, "PYTHONPATH": str(source)},
                cwd=self.folder,
            )
        self.processes.append(process)
        return process

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_link(self) -> None:
        """Start the SuperLink and wait until it listens."""
        self.link = self.spawn(
            "superlink",
            [
                "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
                "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem",
                "--ssl-keyfile", "server.key", "--enable-supernode-auth",
                "--database", "state.db", "--disable-runtime-dependency-installation",
            ],
        )  # fmt: skip

        def listens() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", self.port)) == 0

        wait_for("listening SuperLink", listens, 90)

    def kill_link(self) -> None:
        """Kill the server as a whole: SuperLink, executor and server app."""
        kill_tree(self.link)

    def register(self, *names: str) -> None:
        """Make keys and register them under these names."""

        def one(name: str) -> None:
            write_key(self.folder / name)
            self.flwr("supernode", "register", f"{self.folder / name}.pub", "here", "--name", name)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, names))

    def start_node(
        self, name: str, source: Path = SOURCE, **config: Any
    ) -> subprocess.Popen[bytes]:
        """Start a SuperNode with the key of this name."""
        words = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        node = self.spawn(
            name,
            [
                "flower-supernode", "--root-certificates", "ca.crt",
                "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()),
                "--auth-supernode-private-key", name, "--node-config", words,
            ],
            source,
        )  # fmt: skip
        self.nodes[name] = node
        return node

    def kill_node(self, name: str) -> None:
        kill_tree(self.nodes[name])

    def flwr(self, *words: str) -> str:
        """Run the `flwr` command to its end."""
        done = subprocess.run(
            [str(BIN / "flwr"), *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, app: Path, **config: Any) -> str:
        """Start a run of the app; keys are written with `__` for the dot. Returns its id."""
        words = " ".join(f"{k.replace('__', '.')}={json.dumps(v)}" for k, v in config.items())
        said = self.flwr("run", str(app), "here", "-c", words)
        found = re.search(r"started run (\d+)", said)
        assert found, said
        return found[1]

    def server_log(self, run_id: str) -> str:
        """Return what the server app of a run has said so far."""
        return self.flwr("log", run_id, "here", "--show")


def records_of(out: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run folder that may still be written to."""
    path = out / "rounds.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def copy_app(to: Path, client: str, server: str | None = None) -> Path:
    """Copy the example app with another client, and another server if given."""
    shutil.copytree(APP, to, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "client_app.py").write_text(client)
    if server is not None:
        (to / "server_app.py").write_text(server)
    return to


def other_version(to: Path, version: str) -> Path:
    """Copy the library and give the copy another version; returns where Python finds it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / "fedglimpse", to / "fedglimpse", ignore=ignored)
    file = to / "fedglimpse" / "version.py"
    file.write_text(file.read_text().replace(f'"{VERSION}"', f'"{version}"'))
    return to
