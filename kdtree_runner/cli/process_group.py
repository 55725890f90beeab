"""Ends an engine's processes so that nothing of theirs stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

TRACKER_SECONDS = 5.0  # that Python's resource trackers get to remove shared memory
POLL_SECONDS = 0.02


def members(group: int) -> dict[int, bool]:
    """The running processes of a process group, and which are Python's resource trackers."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found[int(entry.name)] = b"resource_tracker" in (entry / "cmdline").read_bytes()
    return found


def end_group(group: int) -> None:
    """Kill a process group, and this process if it is in it.

    Resource trackers are left to the last: once those who use it are gone, they remove the shared
    memory that nobody has removed.
    """
    own = os.getpid()
    for pid, is_tracker in members(group).items():
        if not is_tracker and pid != own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if os.getpgid(0) == group:
        os.kill(own, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_SECONDS
    while members(group) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
