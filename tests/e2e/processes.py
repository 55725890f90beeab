"""Examples and servers in processes of their own, started with nothing in the environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from engines import Request

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
START_S = 300.0  # of a server: three processes import vLLM; 20 s on two free cores
STOP_S = 60.0


def user_environment(**changes: str) -> dict[str, str]:
    """A shell without variables of vLLM, OpenMP, Triton or Ray; conftest.py sets some."""
    ours = ("VLLM_", "OMP_", "TRITON_", "TORCHDYNAMO_", "RAY_", "LD_PRELOAD")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path} | changes


def run_example(
    name: str,
    requests: Sequence[Request],
    tmp_path: Path,
    launcher: Sequence[Path] = (),
    **arguments: Any,
) -> tuple[dict[str, Any], str]:
    """Run an example and more requests on its engine: what run_example.py writes, and its output.

    launcher: the command that runs it. arguments: of LLM, beside those of the example.
    """
    given, result = tmp_path / "in.json", tmp_path / "out.json"
    asked = [{"prompt": r.prompt, "options": dict(r.options)} for r in requests]
    given.write_text(json.dumps({"arguments": arguments, "requests": asked}))
    script = Path(__file__).with_name("run_example.py")
    command = [*launcher, sys.executable, script, EXAMPLES / name]
    done = subprocess.run(
        [str(c) for c in (*command, given, result)],
        env=user_environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),  # sends tree_digest to ranks
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(result.read_text()), done.stdout


def free_port() -> int:
    """A TCP port of the loopback device that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runs(process: psutil.Process) -> bool:
    """Whether a process is there and not only waiting for its parent to ask how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """`examples/serve.sh` in a process group of its own."""

    def __init__(self, log: Path, *arguments: str) -> None:
        """log: file for its output. arguments: of `vllm serve`, beside those of the script."""
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(EXAMPLES / "serve.sh"), "--port", str(self.port), *arguments],
                env=user_environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        """Return once it answers, or fail with its log."""
        end = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        else:
            raise AssertionError(self.text()[-8000:])
        self._family = psutil.Process(self.process.pid).children(recursive=True)

    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> str:
        """Body of a GET request."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metrics(self) -> Mapping[str, float]:
        """Values of /metrics by name, summed over labels."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.split("{")[0]] = values.get(name.split("{")[0], 0.0) + float(value)
        return values

    def child(self, title: str) -> psutil.Process:
        """The process below it whose title holds a word: "EngineCore" or "Worker"."""
        found = [p for p in self._family if title in " ".join(p.cmdline())]
        assert len(found) == 1, [p.cmdline() for p in self._family]
        return found[0]

    def end(self, timeout: float = STOP_S) -> int:
        """Wait for it to end by itself; its exit code."""
        return self.process.wait(timeout)

    def survivors(self, timeout: float = STOP_S) -> list[psutil.Process]:
        """Processes below it that still run some time after its end."""
        end = time.monotonic() + timeout
        while left := [p for p in self._family if runs(p)]:
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        return left

    def stop(self) -> int:
        """Ask it to end, as a service manager does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in filter(runs, self._family):
            process.kill()
