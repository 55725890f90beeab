"""Engines side by side: who measures when, and what becomes of one that fails."""

import os
from pathlib import Path

import pytest
from cli_fakes import SAMPLING, SETTINGS, scripted_child, write_model

from kdtree_runner.cli import turns
from kdtree_runner.cli.engine import Mode
from kdtree_runner.cli.errors import EngineError, UserError
from kdtree_runner.cli.main import main
from kdtree_runner.cli.prompts import Prompt
from kdtree_runner.cli.supervise import BenchJob
from kdtree_runner.cli.turns import run_side_by_side

MODES = [Mode("plain"), Mode("chain"), Mode("tree", 8, adapt=False), Mode("tree", 8, adapt=True)]

# Keeps a diary of when it measured; a turn is a byte on its standard input.
CHILD = """
me = job['engine']['speculative_config'] if job['engine'].get('speculative_config') else {}
name = me.get('method', 'plain') + ('+' if me.get('tree_budget_adapt') else '')
diary = open(DIARY, 'a')
if name == FAILS:
    sys.exit(5)
send({'event': 'ready'})
for i in range(len(job['batches']) * job['repeats']):
    if job['turns']:
        assert os.read(0, 1)
    print(name, 'begins', file=diary, flush=True)
    time.sleep(0.01)
    print(name, 'ends', file=diary, flush=True)
    send({'event': 'measured'})
send({'event': 'result', 'num_tokens': 5, 'seconds': 1.0, 'name': name})
"""


def child(folder: Path, fails: str = "") -> tuple[str, ...]:
    names = f"DIARY, FAILS = {str(folder / 'diary')!r}, {fails!r}\n"
    return scripted_child(folder, names + CHILD)


def jobs() -> list[BenchJob]:
    prompts = [Prompt(prompt="one")]
    return [
        BenchJob(mode, SETTINGS, SAMPLING, prompts, batches=(1, 2), repeats=2, turns=True)
        for mode in MODES
    ]


heard: list[dict] = []  # events of all engines


def run(tmp_path: Path, fails: str = "") -> list:
    heard.clear()
    command = child(tmp_path, fails)
    return list(run_side_by_side(jobs(), tmp_path, lambda mode: heard.append, 20.0, command))


def test_one_measures_at_a_time_and_every_other_round_runs_backwards(tmp_path: Path) -> None:
    found = run(tmp_path)
    names = ["plain", "dflash", "ddtree", "ddtree+"]
    assert [mode for mode, _ in found] == MODES
    assert [result["name"] for _, result in found] == names
    rounds = [names, names[::-1], names, names[::-1]]
    want = [f"{name} {what}" for order in rounds for name in order for what in ("begins", "ends")]
    assert (tmp_path / "diary").read_text().splitlines() == want
    assert sum(event["event"] == "measured" for event in heard) == 4 * 4


def test_the_others_go_on_without_one_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, fails="dflash")
    assert [isinstance(result, dict) for _, result in found] == [True, False, True, True]
    assert isinstance(found[1][1], EngineError)
    assert str(found[1][1]).startswith("chain: the engine's process ended with exit code 5")
    assert "exit code 5" in capsys.readouterr().err
    assert len((tmp_path / "diary").read_text().splitlines()) == 3 * 4 * 2


HANGING = """
open(PID, 'w').write(str(os.getpid()))
send({'event': 'ready'})
time.sleep(600)
"""


def test_one_that_hangs_is_ended_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = scripted_child(tmp_path, f"PID = {str(pid)!r}\n{HANGING}")
    heard.clear()
    for _, problem in run_side_by_side(
        jobs()[:1], tmp_path, lambda mode: heard.append, 1.0, command
    ):
        assert "said nothing for 1 seconds" in str(problem)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("command", ["e2e", "step"])
def test_flags(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a GPU every engine gets its share of the memory; what an engine does is its mode's."""
    asked: list[BenchJob] = []

    def stop(given: list[BenchJob], *rest: object) -> None:
        asked.extend(given)
        raise UserError("enough")

    monkeypatch.setattr(turns, "run_side_by_side", stop)
    monkeypatch.setattr("kdtree_runner.cli.bench_e2e.is_cpu_build", lambda: False)
    pair = ["--model", write_model(tmp_path / "t"), "--drafter", write_model(tmp_path / "d")]
    flags = ["bench", command, *pair, "--side-by-side", "--modes", "adaptive,plain,tree"]
    assert main(flags) == 2
    assert "--side-by-side: wanted --kv-cache-gib too" in capsys.readouterr().err
    assert main([*flags, "--kv-cache-gib", "2", "--tree-args", '{"tree_budget_adapt": true}']) == 2
    assert "--modes tree or adaptive" in capsys.readouterr().err
    assert main([*flags, "--kv-cache-gib", "2", "--tree-budget", "8,16"]) == 2
    assert [job.mode.label for job in asked] == ["plain", "tree 8", "tree 16", "adaptive 16"]
    assert {job.settings.gpu_memory_utilization for job in asked} == {0.9 / 4}
    specs = [job.to_dict()["engine"].get("speculative_config", {}) for job in asked]
    assert [spec.get("tree_budget_adapt") for spec in specs] == [None, False, False, True]
    assert all(job.to_dict()["turns"] for job in asked)
