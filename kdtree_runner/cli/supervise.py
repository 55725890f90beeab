"""Runs one engine job in a child process, of which a result or an error comes, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_runner.cli.engine import (
    NUM_LOGPROBS,
    EngineSettings,
    Mode,
    Sampling,
    engine_args,
    engine_environment,
    wants_gaps,
)
from kdtree_runner.cli.errors import EngineError, UserError
from kdtree_runner.cli.process_group import end_group
from kdtree_runner.cli.prompts import Prompt

LOG_TAIL = 20  # lines of the log shown on failure
POLL_SECONDS = 0.2
MAX_SOCKET_FOLDER = 60  # characters: a socket's whole path has at most 107, its name 36
SHUTDOWN_SECONDS = 60.0  # workers of a big engine take a while to go
# -P: the folder that the command runs in may hold a platform.py or json.py of the user's.
SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
CHILD = (sys.executable, *SAFE_PATH, "-m", "kdtree_runner.cli.child")
# What Python's extensions say at the end of a process that failed: no part of its story.
NOISE = re.compile(r"nanobind: leaked|\s*- (leaked|\.\.\. skipped)|See https://nanobind")

if TYPE_CHECKING:
    from typing_extensions import Self

Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One engine, and what it is to generate.

    gaps: have the greedy baseline record by how much each token won, which takes it some time.
    one_by_one: run the prompts one after another (batch 1), not together.
    stream: report the text of every step; snapshots: and the tree of each step of prompt 0.
    """

    mode: Mode
    settings: EngineSettings
    sampling: Sampling
    prompts: list[Prompt]
    gaps: bool = True
    one_by_one: bool = False
    stream: bool = False
    snapshots: bool = False

    def to_dict(self) -> dict[str, Any]:
        wanted = self.gaps and wants_gaps(self.mode, self.sampling)
        return {
            "task": "generate",
            "engine": engine_args(self.mode, self.settings),
            "sampling": asdict(self.sampling),
            "prompts": [prompt.to_dict() for prompt in self.prompts],
            "logprobs": NUM_LOGPROBS if wanted else 0,
            "one_by_one": self.one_by_one,
            "stream": self.stream,
            "snapshots": self.snapshots and self.mode.kind == "tree",
        }


@dataclass(frozen=True)
class BenchJob(Job):
    """One engine to be measured.

    task: "waves", timed groups of requests, or "profile", whose steps are taken apart.
    batches: requests decoded together, one measurement each. repeats: of every measurement, each
    on the next prompts. requests: of a repeat, in whole batches. num_steps: that a profile holds.
    turns: wait for a turn before each measurement, and tell when it is over.
    """

    task: str = "waves"
    batches: tuple[int, ...] = (1,)
    repeats: int = 1
    requests: int = 1
    num_steps: int = 0
    turns: bool = False

    @property
    def num_turns(self) -> int:
        """Measurements that the job consists of."""
        return len(self.batches) * (self.repeats if self.task == "waves" else 1)

    def to_dict(self) -> dict[str, Any]:
        own = ("task", "batches", "repeats", "requests", "num_steps", "turns")
        return super().to_dict() | {name: getattr(self, name) for name in own}


class EngineProcess:
    """The process of one job, from its start to its last event. At the end of the context it and
    every worker that it left are gone.

    log_dir: where the job and the child's output go. silence_seconds: how long the child may say
    nothing, while it is listened to, before it counts as hung.
    """

    def __init__(
        self, job: Job, log_dir: Path, silence_seconds: float, command: tuple[str, ...] = CHILD
    ) -> None:
        self.job, self.silence_seconds = job, silence_seconds
        name = job.mode.label.replace(" ", "-")
        job_path, self.log_path = log_dir / f"{name}.json", log_dir / f"{name}.log"
        job_path.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        self._fd, write_fd = os.pipe()
        self._last: Event = {}
        self._events = self._read()
        short = len(str(log_dir)) <= MAX_SOCKET_FOLDER
        sockets = {"VLLM_RPC_BASE_PATH": str(log_dir)} if short else {}  # vLLM leaves them there
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                [*command, str(job_path), str(write_fd)],
                stdin=subprocess.PIPE,  # a byte is a turn; it closes when this process ends
                stdout=log,
                stderr=log,
                env={**sockets, **os.environ, **engine_environment(job.settings)},
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and its workers; again: nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _end(self._child)

    def give_turn(self) -> None:
        """Let a child whose job has `turns` make its next measurement."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended: its events say so
            os.write(self._child.stdin.fileno(), b"\n")

    def listen(self, on_event: Callable[[Event], None], until: str = "result") -> Event:
        """Hand every event on, and return the first of the kind waited for.

        UserError: the engine refused its arguments. EngineError: it failed, with the end of its
        log in the message.
        """
        for event in self._events:
            self._last = event
            on_event(event)
            if event["event"] == until:
                if until == "result":
                    _wait(self._child, SHUTDOWN_SECONDS)
                return event
            if event["event"] in ("result", "error"):
                break
        raise _failure(self.job.mode, self._child, self._last, self.log_path, self.silence_seconds)

    def _read(self) -> Iterator[Event]:
        """Events of the child, until its end or too long a silence."""
        pending = b""
        heard = time.monotonic()
        while time.monotonic() - heard < self.silence_seconds:
            # Read once more after the end: the pipe may hold events.
            ended = self._child.poll() is not None
            ready, _, _ = select.select([self._fd], [], [], 0 if ended else POLL_SECONDS)
            chunk = os.read(self._fd, 1 << 16) if ready else b""
            if not chunk:
                if ready or ended:
                    return
                continue
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                event: Event = json.loads(line)
                yield event
            heard = time.monotonic()  # nobody may have listened for a while


def run_job(
    job: Job,
    log_dir: Path,
    on_event: Callable[[Event], None],
    silence_seconds: float,
    command: tuple[str, ...] = CHILD,
) -> Event:
    """Run one job in a fresh process (EngineProcess); returns its result event."""
    with EngineProcess(job, log_dir, silence_seconds, command) as process:
        return process.listen(on_event)


def _failure(
    mode: Mode, child: subprocess.Popen[bytes], last: Event, log: Path, silence_seconds: float
) -> UserError | EngineError:
    """Why there is no result."""
    if last.get("event") == "error":
        if last["kind"] == "refused":
            return UserError(f"{mode.label}: {last['message']}")
        reason = f"the engine failed: {last['message']}"
    elif _wait(child, 1.0) is None:
        reason = f"the engine said nothing for {silence_seconds:.0f} seconds (--timeout)"
    elif (code := child.returncode) < 0:
        reason = f"the engine's process was ended by signal {signal.Signals(-code).name}"
    else:
        reason = f"the engine's process ended with exit code {code} and no result"
    return EngineError(f"{mode.label}: {reason}\n{_tail(log)}")


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.rstrip().splitlines() if not NOISE.match(line)]
    shown = "\n".join(f"  {line}" for line in lines[-LOG_TAIL:])
    return f"last lines of its log {log}:\n{shown}"


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(seconds)
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and every worker that it left."""
    end_group(child.pid)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
