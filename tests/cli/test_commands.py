"""`kdtree verify` and `kdtree demo` from flags to exit code, with fake engines."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import DRAFTS, NO_DRAFTS, TOKENS, record, result, write_model

from kdtree_runner.cli import demo, supervise, verify
from kdtree_runner.cli.errors import EngineError
from kdtree_runner.cli.main import main
from kdtree_runner.cli.supervise import Job

OTHER = [TOKENS[0], [4, 5, 99, 98, 97]]


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Flags that name two models and two prompts."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    target, drafter = (write_model(tmp_path / "target"), write_model(tmp_path / "drafter"))
    return ["--model", target, "--drafter", drafter, "--prompts", str(prompts)]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Job]]:
    """Put fake engines in place: what the tree emits, and how it fared. Returns the jobs run."""

    def install(tree: list = TOKENS, acceptance: dict = DRAFTS, gap: float = 1.0) -> list[Job]:
        jobs: list[Job] = []

        def run_job(job, log_dir, on_event, silence_seconds):
            jobs.append(job)
            plain = job.mode.kind == "plain"
            tokens = tree if job.mode.kind == "tree" else TOKENS
            records = [record(ids, 5 if plain else 3, gap) for ids in tokens]
            on_event({"event": "phase", "name": "loading the model"})
            on_event({"event": "ready", "startup_seconds": 1.0})
            on_event({"event": "progress", "tokens": 4, "finished": 0})
            for index, ids in enumerate(tokens if job.stream else []):
                text = " ".join(map(str, ids)) + "\n"
                step = {"index": index, "text": text, "num_tokens": len(ids), "seconds": 0.5}
                on_event({"event": "step", **step})
            if job.snapshots and job.mode.kind == "tree":
                on_event(TREE_EVENT)
            event = result(records, NO_DRAFTS if plain else acceptance)
            on_event(event)
            return event

        monkeypatch.setattr(supervise, "run_job", run_job)
        return jobs

    return install


TREE_EVENT = {
    "event": "tree",
    "step": 2,
    "texts": ["def", " f", " g", "(", "x"],
    "tokens": [1, 2, 3, 4, 5],
    "parents": [-1, 0, 0, 2, 3],
    "depths": [0, 1, 1, 2, 3],
    "path": [0, 2, 3, 3],
    "num_emitted": 3,
}


def test_equal(pair: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = engines()
    assert main(["verify", *pair, "--max-tokens", "5", "--with-chain", "--control"]) == 0
    out, err = capsys.readouterr()
    assert "tree 16: ready after 1 s, generating" in err
    assert "tree 16: 2 equal, 0 tie, 0 divergent of 2 prompts (epsilon 0.001)" in out
    assert "differs from itself on 0 of 2 prompts" in out
    assert [job.mode.label for job in jobs] == ["tree 16", "chain", "control", "plain"]
    assert [prompt.prompt for prompt in jobs[0].prompts] == ["one", "two"]


def test_divergent(pair: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    engines(OTHER)
    assert main(["verify", *pair]) == 1
    assert "divergent at 2, gap 1" in " ".join(capsys.readouterr().out.split())


def test_tie_and_strict(pair: list[str], engines: Callable) -> None:
    engines(OTHER, gap=1e-4)
    assert main(["verify", *pair]) == 0
    assert main(["verify", *pair, "--strict"]) == 1
    assert main(["verify", *pair, "--epsilon", "0"]) == 1


def test_nothing_drafted_is_a_failed_check(
    pair: list[str], engines: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(acceptance=NO_DRAFTS)
    out = tmp_path / "report.json"
    assert main(["verify", *pair, "--json", str(out)]) == 3
    assert "nothing was checked: tree 16 never drafted a token" in capsys.readouterr().err
    assert json.loads(out.read_text())["exit_code"] == 3


def test_json_report(pair: list[str], engines: Callable, tmp_path: Path) -> None:
    engines()
    out = tmp_path / "report.json"
    assert main(["verify", *pair, "--tree-budget", "8,16", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert list(report["modes"]) == ["plain", "tree 8", "tree 16"]
    assert report["exit_code"] == 0


def test_engine_failure_keeps_the_log(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    def run_job(job, log_dir, on_event, silence_seconds):
        folders.append(log_dir)
        raise EngineError("plain: the engine's process ended with exit code 7 and no result")

    monkeypatch.setattr(supervise, "run_job", run_job)
    assert main(["verify", *pair]) == 3
    assert "exit code 7" in capsys.readouterr().err
    assert folders[0].is_dir()
    folders[0].rmdir()


def test_logs_of_a_good_run_go(pair: list[str], engines: Callable, tmp_path: Path) -> None:
    with verify.log_directory() as folder:
        (folder / "x.log").write_text("")
    assert not folder.exists()


def test_interrupt(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "run_job", run_job)
    assert main(["verify", *pair]) == 130


def test_terminated(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def run_job(job, log_dir, on_event, silence_seconds):
        folders.append(log_dir)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(supervise, "run_job", run_job)
    with pytest.raises(SystemExit) as stop:
        main(["verify", *pair])
    assert stop.value.code == 143
    assert not folders[0].exists()


def test_demo_equal(pair: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = engines()
    assert main(["demo", *pair, "--num-prompts", "2"]) == 0
    out = capsys.readouterr().out
    assert "EQUAL: DDTree gave plain decoding's 10 tokens on 2 prompts" in out
    assert "draft tree of step 2: 2 of 4 nodes accepted, 3 tokens emitted" in out
    assert "├─" in out
    assert "·g ✓" in out
    assert "·f ✓" not in out
    assert "one7 8 9 10 11▏" in out
    assert [job.mode.label for job in jobs] == ["plain", "chain", "tree 16"]
    assert all(job.one_by_one and job.stream for job in jobs)
    assert {job.settings.dtype for job in jobs} == {"float32"}


def test_demo_not_equal(
    pair: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(OTHER, gap=0.0)  # not even a tie is equal
    assert main(["demo", *pair, "--num-prompts", "2"]) == 1
    assert "NOT EQUAL: DDTree's tokens differ on 1 of 2 prompts" in capsys.readouterr().out


def test_demo_without_drafts(pair: list[str], engines: Callable) -> None:
    engines(acceptance=NO_DRAFTS)
    assert main(["demo", *pair, "--num-prompts", "2"]) == 3


def test_demo_says_which_part_of_the_pair_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TINY_KIMI", Path("no_such_pair"))
    assert main(["demo"]) == 2
    assert "--model: wanted the miniature target in" in capsys.readouterr().err
    write_model(tmp_path / "no_such_pair" / "target")
    assert main(["demo"]) == 2
    assert "--drafter: wanted the miniature drafter in" in capsys.readouterr().err
