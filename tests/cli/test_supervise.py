"""A child process that answers, refuses, fails, crashes or hangs: always a result or an error."""

import os
import time
from pathlib import Path

import pytest
from cli_fakes import job, scripted_child

from kdtree_runner.cli.errors import EngineError, UserError
from kdtree_runner.cli.supervise import run_job


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
    for _ in range(100):  # an orphan is reaped by init in its own time
        state = Path(f"/proc/{worker}/stat")
        if not state.is_file() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"worker {worker} still runs")


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
