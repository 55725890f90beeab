"""A child process that answers, refuses, fails, crashes or hangs: always a result or an error."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import job, scripted_child

from kdtree_runner.cli.errors import EngineError, UserError
from kdtree_runner.cli.supervise import EngineProcess, run_job


def run(tmp_path: Path, body: str, silence_seconds: float = 20.0) -> tuple[dict, list[dict]]:
    events: list[dict] = []
    command = scripted_child(tmp_path, body)
    return run_job(job(), tmp_path, events.append, silence_seconds, command), events


def test_result_and_events(tmp_path: Path) -> None:
    body = (
        "send({'event': 'phase', 'name': job['engine']['model']})\n"
        "send({'event': 'result', 'text': 'x' * 200_000})\n"  # several reads of the pipe
    )
    result, events = run(tmp_path, body)
    assert [event["event"] for event in events] == ["phase", "result"]
    assert events[0]["name"] == "target"
    assert len(result["text"]) == 200_000


def test_refusal_is_the_users_mistake(tmp_path: Path) -> None:
    body = "send({'event': 'error', 'kind': 'refused', 'message': 'tree_budget: wanted 1'})\n"
    with pytest.raises(UserError, match=r"^tree 16: tree_budget: wanted 1$"):
        run(tmp_path, body)


def test_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    body = (
        "for i in range(100): print('line', i, flush=True)\n"
        "print('the cause', file=sys.stderr, flush=True)\n"
        "send({'event': 'error', 'kind': 'failed', 'message': 'no memory'})\n"
    )
    with pytest.raises(EngineError, match="tree 16: the engine failed: no memory") as error:
        run(tmp_path, body)
    assert "the cause" in str(error.value)
    assert "line 3\n" not in str(error.value)
    assert str(tmp_path / "tree-16.log") in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os._exit(7)", "ended with exit code 7 and no result"),
        ("os._exit(0)", "ended with exit code 0 and no result"),
        ("os.kill(os.getpid(), 9)", "ended by signal SIGKILL"),
        ("os.abort()", "ended by signal SIGABRT"),
        ("raise SystemError('oops')", "SystemError: oops"),
    ],
)
def test_crash(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run(tmp_path, body)


def test_silence_counts_as_a_hang_and_ends_the_child(tmp_path: Path) -> None:
    body = (
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "send({'event': 'phase', 'name': 'loading'})\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(EngineError, match=r"said nothing for 2 seconds \(--timeout\)"):
        run(tmp_path, body, silence_seconds=2.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_workers_left_behind_are_ended(tmp_path: Path) -> None:
    body = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    time.sleep(600)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\n"
        "send({'event': 'result'})\n"
    )
    run(tmp_path, body)
    worker = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{worker}/stat")  # an orphan is reaped by init in its own time
    _until(lambda: not state.is_file() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def test_interrupt_ends_the_child(tmp_path: Path) -> None:
    def interrupt(event: dict) -> None:
        raise KeyboardInterrupt

    body = (
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "send({'event': 'phase', 'name': 'loading'})\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        run_job(job(), tmp_path, interrupt, 20.0, scripted_child(tmp_path, body))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("by", ["its supervisor", "the end of its parent"])
def test_shared_memory_of_a_killed_engine_goes_too(by: str, tmp_path: Path) -> None:
    """Those who made it are killed; Python's resource tracker must live to remove it."""
    name, script = tmp_path / "name", tmp_path / "child.py"
    script.write_text(
        "import os, sys, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from kdtree_runner.cli.child import Channel\n"
        "channel = Channel(int(sys.argv[2]), False)\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "os.fork()\n"
        f"open({str(name)!r}, 'w').write(memory.name)\n"
        "time.sleep(600)\n"
    )
    command = (sys.executable, str(script))
    if by == "the end of its parent":
        body = (
            "import sys; from pathlib import Path; from cli_fakes import job\n"
            "from kdtree_runner.cli.supervise import run_job\n"
            f"run_job(job(), Path({str(tmp_path)!r}), print, 60.0, {command!r})\n"
        )
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        parent = subprocess.Popen([sys.executable, "-c", body], env=environment)
        _until(lambda: name.is_file() and name.read_text())
        parent.kill()
        parent.wait()
    else:
        with EngineProcess(job(), tmp_path, 60.0, command):
            _until(lambda: name.is_file() and name.read_text())
            assert (Path("/dev/shm") / name.read_text()).is_file()
    memory = Path("/dev/shm") / name.read_text()
    _until(lambda: not memory.exists())


def _until(condition: Callable[[], object]) -> None:
    """Wait for it, half a minute at most."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited for nothing")
